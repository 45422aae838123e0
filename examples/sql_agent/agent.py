"""An agent that answers questions about a database by writing SQL, as long as it takes to get it right."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from read_only_database import QueryFailed, ReadOnlyDatabase, SqlQueries

from agentloop import Message, Task

SYSTEM_PROMPT = "Answer with a query: the rows of your last one are the answer. Then say: Done."


class SqlAgent(SqlQueries):
    """Reward 1 if the last query gives the rows of the right one, in whatever order, else 0.

    A task names its database, a file in `folder`, so each episode opens its own.
    """

    DONE = "Done."

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def task_from_row(self, row: Mapping[str, Any]) -> Task:
        return Task((Message("system", SYSTEM_PROMPT), Message("user", row["question"])), row)

    def start(self, task: Task) -> None:
        self.database = ReadOnlyDatabase(self._folder / task.payload["database"])

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        calls = [call for message in messages for call in message.tool_calls if call.name == "run_sql"]
        if not calls or messages[-1].content != self.DONE:
            return 0.0
        try:
            given = self.database.query(str(calls[-1].arguments.get("query")))
        except QueryFailed:
            return 0.0
        right = self.database.query(task.payload["sql"])
        return float(given.same_rows(right))
