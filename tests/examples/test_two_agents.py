"""The commands of the pages of the two agents, from the data to a trained model; and the pages' tables."""

import shlex
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import two_agents
from benchmarks._trained import read
from tests.docs.blocks import ROOT, blocks
from tests.docs.test_blocks import SMALL, checkout, typed
from tests.fakes.runs import rows

ROWS = ["--demonstrations", "24", "--tasks", "16"]
SMALLER = [*SMALL, "run.iterations=2", "tiny.layers=1", "sft.every=2"]


def page_commands(agent: str) -> list[list[str]]:
    name = str(two_agents.page(agent).relative_to(ROOT))
    found = [block for block in blocks() if block.place.startswith(f"{name}:") and block.language == "sh"]
    return [shlex.split(command) for block in found for command in block.commands()]


@pytest.mark.slow
@pytest.mark.parametrize("agent", two_agents.AGENTS)
def test_commands_of_the_page_make_data_and_train(agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkout(tmp_path / "checkout")
    data, start, train, inspect = page_commands(agent)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", [data[2], *ROWS])
    import_module(data[2]).main()
    sets = [part for setting in SMALLER for part in ("--set", setting)]
    assert typed([*start, *sets], folder, monkeypatch) == 0
    assert typed([*train, *sets], folder, monkeypatch) == 0
    run = folder / inspect[2]
    assert rows(run / "replay.sqlite", "select count(*) from iterations") == [(2,)]
    assert rows(run / "replay.sqlite", "select count(*) from metrics where name = 'eval/success'")[0][0] >= 2


@pytest.mark.parametrize("agent", two_agents.AGENTS)
def test_table_of_the_page_is_that_of_the_results(agent: str) -> None:
    found = [row for row in read(two_agents.RESULTS) if row["agent"] == agent]
    assert two_agents.table(found) in two_agents.page(agent).read_text(encoding="utf-8")
    assert len(found) == len(two_agents.SEEDS)
    assert all(row["after"] - row["before"] >= 0.3 for row in found)
