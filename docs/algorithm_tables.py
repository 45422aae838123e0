"""The tables of docs/algorithms.md that the algorithms declare; `python -m docs.algorithm_tables` writes them there."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from agentloop.algorithms.catalog import ALGORITHMS, OBJECTIVES
from agentloop.algorithms.declarations import Objective

PAGE = Path(__file__).parent / "algorithms.md"


def with_tables(page: str) -> str:
    """The page with each table in the place of the one with the same header."""
    advantages = [(f"`{a.name}`", a.formula, a.no_signal, a.paper, a.remark) for a in ALGORITHMS.values()]
    page = _replaced(page, ("`algorithm`", "advantage", "0, so nothing learned", "source", "deviation"), advantages)
    objectives = [(f"`{o.name}`", o.formula, _options(o), o.paper) for o in OBJECTIVES.values()]
    return _replaced(page, ("objective", "loss of a token", "options (default)", "source"), objectives)


def _options(objective: Objective) -> str:
    shown = []
    for name, (_, default) in objective.options.items():
        replay = objective.replay_defaults.get(name)
        shown.append(f"`{name}` {_plain(default)}" + ("" if replay is None else f" (replay {_plain(replay)})"))
    return ", ".join(shown)


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _replaced(page: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = page.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"| {header[0]} | {header[1]} |"))
    end = next(number for number in range(begin, len(lines)) if not lines[number].startswith("|"))
    table = [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in (header, *rows)]
    lines[begin:end] = [table[0], "|---" * len(header) + "|", *table[1:]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
