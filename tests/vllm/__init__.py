"""A real vLLM for the soak tests: its environment, and the server they start."""
