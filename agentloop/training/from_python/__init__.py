"""A run from functions as they are in Python, and what has become of it."""
