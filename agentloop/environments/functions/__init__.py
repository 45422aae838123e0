"""An environment without a class: rows of data as tasks, functions as tools."""
