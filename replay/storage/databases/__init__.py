"""Databases that hold a buffer, SQLite files and PostgreSQL databases, which behave alike; opened by path or URL."""

from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import exc

from replay.errors import DatabaseRefused
from replay.storage.databases import postgres, sqlite
from replay.storage.databases.database import Database, Result, retried

__all__ = ["Database", "Location", "Result", "check_url", "create_database", "open_database", "retried"]

Location = str | Path
"""A file, `sqlite:///PATH`, or `postgresql+psycopg://USER@HOST/NAME`."""


def create_database(location: Location) -> Database:
    """Open a database for writing, and create it if it does not exist. Raises DatabaseRefused for a database of another
    program or schema, and leaves it as it is."""
    place = parsed(location)
    return sqlite.create(place) if isinstance(place, Path) else postgres.create(place)


def open_database(location: Location, *, read_only: bool) -> Database:
    """Open an existing database; it is never created."""
    place = parsed(location)
    if isinstance(place, Path):
        return sqlite.open_existing(place, read_only=read_only)
    return postgres.open_existing(place, read_only=read_only)


def parsed(location: Location) -> Path | sa.URL:
    """The file behind a path or a sqlite:/// URL, or the URL of a server's database."""
    if isinstance(location, Path) or "://" not in location:
        return Path(location)
    try:
        url = sa.make_url(location)
        if location.count("@") > 1:
            raise ValueError("a part of the password would be parsed as the host")
    except (exc.ArgumentError, ValueError) as error:
        # A URL that can't be parsed may hold a password anywhere.
        scheme = location.partition("://")[0]
        raise DatabaseRefused(
            f"database must be a path, sqlite:///PATH or postgresql+psycopg://USER@HOST/NAME, got a malformed "
            f"{scheme}:// URL. Write special characters of its parts as %XX."
        ) from error
    if url.get_backend_name() == "sqlite" and url.database:
        return Path(url.database)
    if url.drivername in postgres.DRIVERS and url.database:
        return url.set(drivername="postgresql+psycopg")
    raise DatabaseRefused(
        "database must be a path, sqlite:///PATH or postgresql+psycopg://USER@HOST/NAME, "
        f"got {postgres.shown(url)}. Give one of these."
    )


def check_url(url: str) -> None:
    """Raises DatabaseRefused for a URL that a configuration must not hold, for it is stored and shown: one with a
    password, or with a relative path."""
    place = parsed(url)
    if "://" not in url or (isinstance(place, Path) and not place.is_absolute()):
        raise DatabaseRefused(
            f"database must be a URL with a whole path, got {url!r}. Write postgresql+psycopg://USER@HOST/NAME or "
            "sqlite:////PATH, or leave it out."
        )
    if isinstance(place, sa.URL) and (place.password is not None or postgres.SECRETS & place.query.keys()):
        raise DatabaseRefused(
            f"database must hold no password, for configurations are stored and shown, got one in "
            f"{postgres.shown(place)}. Put the password into ~/.pgpass, or into a file that PGPASSFILE names."
        )
