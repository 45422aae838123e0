"""A real vLLM for the soak tests: its packages, and the server they start."""
