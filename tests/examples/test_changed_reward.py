"""Exported rows get another reward, and are imported with the advantages that it gives them in their group."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from agentloop.environments import Task
from context.messages import Message
from examples.fetch_elsewhere import Elsewhere, elsewhere
from replay.exchange import export_file, import_file
from tests.fakes.records import Fresh, new_store, sql

HALVED = "def halved(row):\n    return row['reward'] / (1 + row['member'])\n"


def test_rows_are_rewarded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = new_store(tmp_path / "before.sqlite"), new_store(tmp_path / "after.sqlite")
    Fresh(1, rates=(0.5,), size=4).append_to(store)
    export_file(store, tmp_path / "rows.jsonl")
    (tmp_path / "mine.py").write_text(HALVED)
    monkeypatch.setattr(sys, "argv", ["", *(str(tmp_path / name) for name in ("rows.jsonl", "new.jsonl", "mine.py"))])
    sys.argv[-1] += ":halved"
    runpy.run_module("examples.changed_reward", run_name="__main__")
    assert import_file(other, tmp_path / "new.jsonl", name="before").inserted == 4
    found = sql(other, "select reward, success, source, advantage from trajectories order by member")
    assert [row[:3] for row in found] == [(1.0, 1, "before"), *((each, 0, "before") for each in (0.5, 0.0, 0.0))]
    # The mean is 0.375, the sum of squares 0.6875. Deviations: sqrt(0.6875 / 3) for advantages, and with 4 of groups.
    assert [row[3] for row in found] == pytest.approx([1.30558, 0.26112, -0.78335, -0.78335], abs=1e-5)
    assert sql(other, "select reward_mean, reward_std, success_rate from groups") == [
        (0.375, pytest.approx(0.41458, abs=1e-5), 0.25)
    ]


def test_an_item_is_elsewhere_in_any_container_but_the_named_one() -> None:
    task = {"item": "cup", "container": "bed"}
    for placed, named, reward in (("reed", "reed", 1.0), ("bed", "bed", 0.0), ("reed", "bed", 0.0)):
        said = [f'{{"item": "cup", "container": "{placed}"}}', f'"cup" is in "{named}".']
        row = {"task_payload": json.dumps(task), "messages": [{"content": content} for content in said]}
        messages = [Message("tool", said[0]), Message("assistant", said[1])]
        assert elsewhere(row) == Elsewhere().reward(Task("", task), messages) == reward
