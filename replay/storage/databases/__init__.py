"""Where the buffer stands: a SQLite file or a PostgreSQL database, with one behaviour."""

from replay.storage.databases.database import Answer, Database, retried
from replay.storage.databases.open import Location, create_database, open_database

__all__ = ["Answer", "Database", "Location", "create_database", "open_database", "retried"]
