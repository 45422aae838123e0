"""Numbers and tables for a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentloop.runs.display import percent
from context.wording import excerpt, visible

if TYPE_CHECKING:
    from agentloop.rollouts.evaluation import EvaluationReport


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with columns as wide as their contents. Numbers are flush right."""
    rows = [list(map(visible, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    right = [all(re.fullmatch(r"[-+0-9.e%]+", text) for text in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            text.rjust(width) if flush else text.ljust(width)
            for text, width, flush in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in [titles, *rows]
    ]
    return "\n".join(lines)


Cell = str | tuple[str, int] | Callable[[Mapping[str, Any]], str]
"""The name of a value, a number's name with its digits after the point, or a function from a row to text."""


def row_table(rows: Sequence[Mapping[str, Any]], cells: Mapping[str, Cell]) -> str:
    """A table with a line per row; `cells` are by the titles of their columns."""
    return table(list(cells), [[_text(row, cell) for cell in cells.values()] for row in rows])


REQUESTS: dict[str, Cell] = {
    "request": lambda row: str(row["number"]),
    "": "lanes",
    "agent": lambda row: row["agent"] or "-",
    "begins": "begins",
    "reply": "status",
    "kept": "kept_tokens",
    "new": "new_tokens",
    "replied": "sampled_tokens",
    "segment": lambda row: "-" if row["segment"] is None else str(row["segment"]),
}


def _text(row: Mapping[str, Any], cell: Cell) -> str:
    if callable(cell):
        return cell(row)
    return str(row[cell]) if isinstance(cell, str) else number(row[cell[0]], cell[1])


def quoted(name: str, most: int) -> Cell:
    """A cell with the beginning of a text in quotes, or `-` without one."""
    return lambda row: "-" if row[name] is None else repr(excerpt(row[name], most))


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def state_text(row: Mapping[str, Any]) -> str:
    return str(row["state"]) + (f" ({row['state_reason']})" if row["state_reason"] else "")


def yes_or_no(name: str) -> Cell:
    return lambda row: "yes" if row[name] else "no"


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


_TITLES = ("", "value", "from", "to", "95 % interval")
_KINDS = {"wilson": "Wilson", "bootstrap": "bootstrap over tasks"}


def evaluation_table(report: EvaluationReport) -> str:
    """A table with a line per figure: its value, its 95 % confidence interval, and the interval's kind."""
    shares = {f"pass@{k}": share for k, share in report.pass_at_k.items()}
    shares |= {f"pass^{k}": share for k, share in report.pass_hat_k.items() if k > 1}
    shares |= {f"pass@1 in {name}": share for name, share in report.environments.items()}
    shares |= {f"pass@1, {report.evaluation.by}: {value}": share for value, share in report.categories.items()}
    ends = {f"ended: {reason}": share for reason, share in report.stop_reasons.items()}
    means = {"mean turns": report.mean_turns, "mean reward": report.mean_reward}
    rows = []
    for name, found in (shares | means | ends).items():
        form = "{:.2f}".format if name in means else percent
        rows.append((name, form(found.value), form(found.low), form(found.high), _KINDS[found.interval]))
    evaluation = report.evaluation
    each = "" if evaluation.samples == 1 else f", {evaluation.samples} samples each"
    lost = f", {evaluation.engine_failures} more lost to the engine" if evaluation.engine_failures else ""
    head = f"held-out success: {percent(evaluation.success)} ({evaluation.tasks} tasks{each}{lost})"
    why = evaluation.why_none_succeeded
    if why and report.evaluated.policy_version:
        why += ". Where it succeeded before training, begin again with a tenth of optimizer.learning_rate"
    return "\n".join([f"evaluated: {report.evaluated}", head, *([why] if why else []), table(_TITLES, rows)])
