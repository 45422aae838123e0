"""Where the buffer stands: a SQLite file or a PostgreSQL database, with one behaviour."""

from replay.storage.databases.database import Database, Result, WriteOfRuns, retried
from replay.storage.databases.open import Location, create_database, open_database

__all__ = ["Result", "Database", "Location", "WriteOfRuns", "create_database", "open_database", "retried"]
