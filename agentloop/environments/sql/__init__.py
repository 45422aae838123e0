"""Runs SQL that a policy wrote on a real SQLite database that it can only read: for tools, and for rewards."""

from agentloop.environments.sql.query_result import QueryFailed, QueryResult, SqlLimits
from agentloop.environments.sql.read_only_database import ReadOnlyDatabase, SqlQueries

__all__ = ["QueryFailed", "QueryResult", "ReadOnlyDatabase", "SqlLimits", "SqlQueries"]
