"""Episodes of evaluations are kept for people, and change nothing of what a run learns."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentloop.config import RunConfig
from agentloop.training.train import train
from replay import ReplayStore, questions
from tests.fakes.runs import SilentDisplay, rows, small_config

pytestmark = pytest.mark.slow

REDACTOR = """
from dataclasses import replace

def hide(messages):
    return [replace(message, content="hidden") for message in messages]
"""


def config(folder: Path, model: Path, keep: int, **sections: dict[str, object]) -> RunConfig:
    evaluation = {"every": 1, "tasks": 3, "samples": 2, "keep_episodes": keep}
    return small_config(folder, model, rollout={"max_turns": 1}, evaluation=evaluation, **sections)


def test_newest_evaluations_are_kept_with_what_was_said(tmp_path: Path, qwen2: Path) -> None:
    result = train(config(tmp_path, qwen2, keep=2), display=SilentDisplay())
    database = result.folder / "replay.sqlite"
    # Evaluations after iterations 0 to 3, of 3 tasks with 2 samples each.
    query = "select iteration, count(*) from held_out group by iteration order by iteration"
    assert rows(database, query) == [(2, 6), (3, 6)]
    with closing(ReplayStore.open(database, read_only=True)) as store:
        run = store.run().id
        found = questions.held_out(store, run)
        success = questions.metric_series(store, run, names=["eval/success"])["eval/success"][-1]
        assert success == (3, sum(row["success"] for row in found["rows"]) / 6)
        assert [row["number"] for row in found["rows"]] == [0, 1, 2, 3, 4, 5]
        assert found["rows"][0]["task"] == found["rows"][1]["task"] != found["rows"][2]["task"]
        assert found["rows"][0]["prompt"].startswith("Say something of even length")
        on_task = questions.held_out_task(store, run, found["rows"][0]["task"])
        assert [each["iteration"] for each in on_task["episodes"]] == [2, 2, 3, 3]
        # None of them is among what is drawn.
        trained = {row["task"] for row in questions.page(store, limit=500)["rows"]}
        assert trained.isdisjoint(row["task"] for row in found["rows"])


def test_run_is_the_same_whether_they_are_kept_or_not(tmp_path: Path, qwen2: Path) -> None:
    kept, not_kept = (train(config(tmp_path / str(n), qwen2, keep=n), display=SilentDisplay()) for n in (9, 0))
    ours, theirs = (load_file(run.folder / "policies/000003/model.safetensors") for run in (kept, not_kept))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    drawn = "select iteration, slot, probability, stream from draws order by iteration, slot"
    assert rows(kept.folder / "replay.sqlite", drawn) == rows(not_kept.folder / "replay.sqlite", drawn)
    assert rows(kept.folder / "replay.sqlite", "select count(*) from held_out") == [(24,)]
    assert rows(not_kept.folder / "replay.sqlite", "select count(*) from held_out") == [(0,)]


def test_kept_messages_are_redacted_as_all_that_is_stored(tmp_path: Path, qwen2: Path) -> None:
    (tmp_path / "hiding.py").write_text(REDACTOR)
    redact = {"redact": f"{tmp_path / 'hiding.py'}:hide"}
    settings = config(tmp_path, qwen2, keep=1, replay=redact, run={"iterations": 1})
    result = train(settings, display=SilentDisplay())
    with closing(ReplayStore.open(result.folder / "replay.sqlite", read_only=True)) as store:
        found = questions.held_out(store, store.run().id)["rows"]
    assert {(row["prompt"], row["answer"]) for row in found} == {("hidden", "hidden")}
