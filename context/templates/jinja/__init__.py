"""jinja2 as chat templates run in it: sandboxed as in transformers, and bounded in time and memory."""
