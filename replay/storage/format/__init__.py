"""What a database looks like: its tables, its views, and how a record becomes a row and a row a record.

Begin at `schema`, whose tables follow from `replay.records`; `rows` turns records into rows, `encoding` arrays into
bytes.
"""
