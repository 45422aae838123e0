"""Where the buffer stands: a SQLite file or a PostgreSQL database, with one behaviour."""

from replay.storage.databases.database import Database, Result, retried
from replay.storage.databases.open import Location, create_database, open_database

__all__ = ["Result", "Database", "Location", "create_database", "open_database", "retried"]
