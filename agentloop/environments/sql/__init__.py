"""Runs SQL that a policy wrote on a real SQLite database that it can only read: for tools, and for rewards."""

from agentloop.environments.sql.read_only_database import (
    QueryFailed,
    QueryResult,
    ReadOnlyDatabase,
    SqlLimits,
    SqlQueries,
)

__all__ = ["QueryFailed", "QueryResult", "ReadOnlyDatabase", "SqlLimits", "SqlQueries"]
