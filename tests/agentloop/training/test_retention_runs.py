"""Whole runs with a small buffer: what is kept, what a resume takes back, and what models say about stored rows."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from agentloop.cli.main import main
from agentloop.training.from_python.train_result import TrainResult
from agentloop.training.train import train
from replay.storage.format.column_types import ESCAPE
from replay.storage.format.message_json import plain_text
from tests.fakes.runs import SilentDisplay, rows, small_config

pytestmark = pytest.mark.slow

REDACTOR = """
from dataclasses import replace

def hide(messages):
    return [replace(m, content=m.content.replace("1", "*")) for m in messages]

def fail(messages):
    raise ValueError("no idea")

def number(messages):
    return 3
"""


def settings(folder: Path, model: Path, *, iterations: int = 4, **replay: Any) -> Any:
    return small_config(
        folder,
        model,
        run={"iterations": iterations},
        batch={"trajectories": 8},
        replay={"fraction": 0.25, "capacity": {"rows": 10, "age": 2}, **replay},
        checkpoint={"every": 2, "keep": 1},
        evaluation={"every": 0, "tasks": 2},
    )


class KilledAt(SilentDisplay):
    """Ends the process, as far as the run can tell, in the middle of things."""

    def __init__(self, iteration: int) -> None:
        super().__init__()
        self._last = iteration

    def iteration(self, number: int, total: int, metrics: Mapping[str, float]) -> None:
        if number == self._last:
            raise MemoryError("killed")
        super().iteration(number, total, metrics)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> tuple[TrainResult, SilentDisplay]:
    display = SilentDisplay()
    return train(settings(tmp_path_factory.mktemp("runs"), qwen2), display=display), display


def test_run_keeps_to_its_capacity_and_logs_it(finished: tuple[TrainResult, SilentDisplay]) -> None:
    result, display = finished
    database = result.folder / "replay.sqlite"
    fresh = [row["batch/fresh"] for row in display.iterations]
    assert all(row["buffer/rows"] <= max(10, row["batch/fresh"]) for row in display.iterations)
    collected = evicted = 0.0
    for count, row in zip(fresh, display.iterations, strict=True):
        collected += count
        evicted += row["buffer/evicted"]
        assert row["buffer/rows"] == collected - evicted
    assert evicted > 0
    assert rows(database, "select count(*) from reclaimed") == [(evicted,)]
    logged = rows(database, "select value from metrics where name = 'buffer/rows' order by iteration")
    assert [value for (value,) in logged] == [row["buffer/rows"] for row in display.iterations]
    # The last checkpoint is that of iteration 4, and the only one: nothing evicted is needed again.
    assert rows(database, "select count(*) from trajectories where state = 'evicted'") == [(0,)]
    assert rows(database, "select count(*) from draws") == [
        (sum(fresh) + sum(r["batch/replay"] for r in display.iterations),)
    ]


def test_killed_run_that_resumes_ends_like_the_unbroken_one(
    finished: tuple[TrainResult, SilentDisplay], tmp_path: Path, qwen2: Path
) -> None:
    with pytest.raises(MemoryError):
        train(settings(tmp_path, qwen2), display=KilledAt(4))
    # The checkpoint is that of iteration 2; iterations 3 and 4 have evicted since.
    resumed = train(settings(tmp_path, qwen2), resume=True, display=SilentDisplay())
    drawn = (
        "select draws.iteration, draws.slot, collected.iteration, collected.slot, probability from draws join "
        "(select id, iteration, slot from trajectories union all select reclaimed.id, iteration, slot from reclaimed "
        "join groups on groups.id = group_id) as collected on collected.id = trajectory order by 1, 2"
    )
    ours, theirs = resumed.folder / "replay.sqlite", finished[0].folder / "replay.sqlite"
    assert rows(ours, drawn) == rows(theirs, drawn)
    later = "select iteration, slot, state from trajectories where iteration > 2 and attempt = {} order by 1, 2"
    assert rows(ours, later.format(1)) == rows(theirs, later.format(0))
    weights = [
        load_file(folder / "checkpoints/000004/model/model.safetensors")
        for folder in (resumed.folder, finished[0].folder)
    ]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[1])


def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["agentloop", "replay", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    return int(ended.value.code or 0), told.out, told.err


def test_rescore_stores_what_the_newest_policy_says(
    finished: tuple[TrainResult, SilentDisplay],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "copy-001"
    shutil.copytree(finished[0].folder, folder)
    database = folder / "replay.sqlite"
    code, out, _ = ask(monkeypatch, capsys, "rescore", str(folder), "--where", "iteration == 4", "--json")
    answer = json.loads(out)
    ((count, tokens),) = rows(
        database, "select count(*), sum(num_action_tokens) from trajectories where iteration = 4 and state = 'eligible'"
    )
    assert (code, answer["version"], answer["trajectories"], answer["tokens"]) == (0, 4, count, tokens)
    assert 0 < answer["ess"] <= 1 and answer["drift_max"] > 1.0
    assert rows(database, "select count(distinct trajectory), min(policy_version) from token_scores") == [(count, 4)]
    # By the policy that sampled them, drift is 1.
    answer = json.loads(
        ask(monkeypatch, capsys, "rescore", str(folder), "--where", "iteration == 4", "--policy", "3", "--json")[1]
    )
    assert (answer["drift_mean"], answer["drift_max"], answer["ess"]) == pytest.approx((1.0, 1.0, 1.0), abs=1e-4)
    ((id,),) = rows(database, "select id from trajectories where iteration = 4 and slot = 0")
    (segment, *_) = json.loads(ask(monkeypatch, capsys, "show", id, str(folder), "--json")[1])["segments"]
    assert segment["scored_by"]["policy_version"] == 3
    assert [v is None for v in segment["current_log_probs"]] == [v is None for v in segment["behavior_log_probs"]]
    known = [
        (a, b)
        for a, b in zip(segment["current_log_probs"], segment["behavior_log_probs"], strict=True)
        if a is not None
    ]
    assert all(a == pytest.approx(b, abs=1e-4) for a, b in known)


def test_redacted_run_learns_and_leaves_no_tokens_of_what_was_hidden(tmp_path: Path, qwen2: Path) -> None:
    (tmp_path / "hide.py").write_text(REDACTOR)
    config = settings(tmp_path, qwen2, iterations=2, redact=f"{tmp_path}/hide.py:hide", capacity={})
    display = SilentDisplay()
    database = train(config, display=display).folder / "replay.sqlite"
    conversations = [json.loads(plain_text(said)) for (said,) in rows(database, "select said from messages")]
    texts = [said["content"] for conversation in conversations for said in conversation]
    # Texts with a NUL, say, are stored as JSON, whose escapes have digits.
    assert texts and not any("1" in text for text in texts if not text.startswith(ESCAPE))
    ((redacted,),) = rows(database, "select count(*) from trajectories where state_reason = 'redacted'")
    assert redacted == sum(row["buffer/redacted"] for row in display.iterations) > 0
    tokens = "select count(*) from segments where trajectory in (select id from trajectories where state = 'evicted')"
    assert rows(database, tokens) == [(0,)]
    assert rows(database, "select count(*) from iterations") == [(2,)]
