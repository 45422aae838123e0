"""The format of a database: its tables, its views, and the conversion between records and rows.

Begin at `schema`, whose tables follow from `replay.records`. `rows` turns records into rows, and `encoding` arrays into
bytes.
"""
