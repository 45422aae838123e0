"""The parts of `render`: they find who wrote which part of a template's text, and where replies begin and end."""
