"""The gateway: agents use it as their model's address, in any of three protocols, and their sessions are recorded."""
