"""Experience in a database: its tables, every write to them, and every row that is read whole.

Begin at `format/schema`: what tables there are. A row goes in through `write` and comes out through `read`; `databases`
opens a SQLite file or a PostgreSQL server. Everything else is a part of what `replay.store.ReplayStore` can do.
"""
