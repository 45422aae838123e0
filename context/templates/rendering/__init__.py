"""What a template wrote: whose text is where, and where turns begin and end."""
