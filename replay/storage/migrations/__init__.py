"""Alembic migrations, append-only: a released one is never edited."""
