"""Schemas of buffers that one process filled: 0001 to 0008."""
