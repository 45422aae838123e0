"""Experience in a database: its tables, every write to them, and every read of whole rows.

Begin at `format/schema`: what tables there are. A row goes in through `write` and comes out through `read`; `databases`
opens a SQLite file or a PostgreSQL database. Each other module is a part of `replay.store.ReplayStore`.
"""
