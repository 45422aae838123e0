"""The parts of `render`: whose words are where in a template's text, and where replies begin and end."""
