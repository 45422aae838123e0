"""Tools: their schemas, their calls, their time limits and their results."""
