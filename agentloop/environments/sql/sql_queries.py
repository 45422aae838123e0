"""A tool that runs the policy's SQL, ready for an environment of one's own."""

from __future__ import annotations

from agentloop.environments.environment import Environment, tool
from agentloop.environments.sql.query_result import QueryFailed, SqlLimits
from agentloop.environments.sql.read_only_database import ReadOnlyDatabase


class SqlQueries(Environment):
    """Offers `run_sql`; derive from it, and add tasks and rewards, which may query `self.database` too.

    `environment.options` takes `database`, a file, and `limits`, as in {database: shop.sqlite, limits: {rows: 20}}.
    """

    def __init__(self, *, database: str, limits: SqlLimits | None = None) -> None:
        self.database = ReadOnlyDatabase(database, limits)

    @tool
    def run_sql(self, query: str) -> str:
        """Run one SQL query on the database, which can only be read, and see its rows.

        Args:
            query: One SELECT statement in SQLite's dialect.
        """
        try:
            return self.database.query(query).observation()
        except QueryFailed as error:
            return f"[{error}]"
