"""Where the buffer stands: a SQLite file or a PostgreSQL database, with one behaviour."""

from replay.databases.base import Answer, Database, retried
from replay.databases.open import Location, create_database, open_database

__all__ = ["Answer", "Database", "Location", "create_database", "open_database", "retried"]
