"""What a query may take, and what it gave."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

Value = None | int | float | str | bytes
_DIGITS = 9


class QueryFailed(ValueError):
    """A query that is wrong, may not be run, or takes too much. The text is for whoever wrote it."""


@dataclass(frozen=True)
class SqlLimits:
    """What one query may take."""

    seconds: float = 2.0
    """Of the clock, once the query is prepared."""
    rows: int = 50
    """Rows that it gives; the others are left out."""
    characters: int = 4000
    """Of its rows as text; what is beyond them is left out."""
    value_bytes: int = 50_000
    """Of one row, text or blob, also of those in between; a query with a longer one ends."""
    query_characters: int = 4000
    """Of the query itself."""

    def __post_init__(self) -> None:
        for name in ("seconds", "rows", "characters", "value_bytes", "query_characters"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"SqlLimits.{name} must be > 0, got {value}")


@dataclass(frozen=True)
class QueryResult:
    """The rows of a query, in the order in which the database gave them."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    complete: bool
    """False: there were more rows than `SqlLimits.rows`."""
    limits: SqlLimits

    def same_rows(self, other: QueryResult, *, in_order: bool = False) -> bool:
        """Whether both hold the same rows, each as often; False where one of them is not complete.

        Names of columns don't count. Numbers are the same to nine digits, 2 and 2.0 too: a sum depends on the order in
        which it was made.
        """
        if not (self.complete and other.complete):
            return False
        mine, others = ([tuple(map(_comparable, row)) for row in result.rows] for result in (self, other))
        return mine == others if in_order else Counter(mine) == Counter(others)

    def observation(self) -> str:
        """A line of names and a line for each row: what a policy is shown."""
        lines = [" | ".join(self.columns), *(" | ".join(map(_shown, row)) for row in self.rows)]
        text = "\n".join(lines if self.rows else [*lines, "(no rows)"])
        if len(text) > self.limits.characters:
            return f"{text[: self.limits.characters]}...\n[cut: more than {self.limits.characters} characters]"
        return text if self.complete else f"{text}\n[cut: more than {self.limits.rows} rows]"


def _shown(value: Value) -> str:
    """As SQL writes it, but text without quotes."""
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    return "NULL" if value is None else str(value)


def _comparable(value: Value) -> Value:
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{_DIGITS}g}")
    return value
