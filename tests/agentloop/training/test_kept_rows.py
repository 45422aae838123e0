"""Runs with a small buffer and kept evaluations: what stays, what a resume takes back, and what policies say of it."""

import itertools
import json
import math
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentloop.cli.replay import app as replay_commands
from agentloop.config import RunConfig
from agentloop.training.train import TrainResult, train
from replay import ReplayStore, questions
from replay.storage.format.rows import plain_text
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.processes import assert_same_bits, assert_same_weights
from tests.fakes.runs import SilentDisplay, rows, small_config

pytestmark = pytest.mark.slow

PARITY = ENVIRONMENTS / "parity.py"
REDACTOR = """
from dataclasses import replace

from context import HermesParser, Reply, ToolCall

def hide(messages):
    return [replace(message, content="hidden", tool_calls=()) for message in messages]

class Asking:  # a parser that reads a call in every other reply
    def parse(self, text, *, stopped):
        reply = HermesParser().parse(text, stopped=stopped)
        if len(text) % 2 == 0:
            return reply
        call = ToolCall("count", {"text": "where jane lives"}, "call-0")
        return Reply("tool_calls", replace(reply.message, content="", tool_calls=(call,)), None)
"""


def settings(folder: Path, model: Path) -> RunConfig:
    return small_config(
        folder,
        model,
        run={"iterations": 4},
        batch={"trajectories": 8},
        replay={"fraction": 0.25, "capacity": {"rows": 10, "age": 2}},
        checkpoint={"every": 2, "keep": 1},
        evaluation={"every": 0, "tasks": 2},
    )


def killed(number: int) -> None:
    """Ends the process, as far as the run can tell, in the middle of the last iteration."""
    if number == 4:
        raise MemoryError("killed")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> tuple[TrainResult, SilentDisplay]:
    display = SilentDisplay()
    return train(settings(tmp_path_factory.mktemp("runs"), qwen2), display=display), display


def test_run_keeps_to_its_capacity_and_logs_it(finished: tuple[TrainResult, SilentDisplay]) -> None:
    result, shown = finished
    file = result.folder / "replay.sqlite"
    new = [row["batch/fresh"] for row in shown.iterations]
    assert all(row["buffer/rows"] <= max(10, row["batch/fresh"]) for row in shown.iterations)
    collected = evicted = 0.0
    for count, row in zip(new, shown.iterations, strict=True):
        collected += count
        evicted += row["buffer/evicted"]
        assert row["buffer/rows"] == collected - evicted
    assert evicted > 0
    assert rows(file, "select count(*) from reclaimed") == [(evicted,)]
    # The last checkpoint is that of iteration 4, and the only one: nothing evicted is needed again.
    assert rows(file, "select count(*) from trajectories where state = 'evicted'") == [(0,)]
    assert rows(file, "select count(*) from draws") == [(sum(new) + sum(r["batch/replay"] for r in shown.iterations),)]


def test_killed_run_ends_as_unbroken(finished: tuple[TrainResult, SilentDisplay], tmp_path: Path, qwen2: Path) -> None:
    with pytest.raises(MemoryError):
        train(settings(tmp_path, qwen2), display=SilentDisplay(at_iteration=killed))
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
    kept = "select iteration, name, value from metrics where name like 'buffer/%' order by 1, 2"
    assert rows(ours, kept) == rows(theirs, kept)
    assert_same_weights(resumed.folder, finished[0].folder)


_OF_4 = "select id from trajectories where iteration = 4 and state = 'eligible'"


def test_rescore_stores_what_a_policy_says(finished: tuple[TrainResult, SilentDisplay], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished[0].folder, tmp_path / "copy-001"))
    database, chosen = folder / "replay.sqlite", ("--where", "iteration == 4", "--json")

    def ask(*words: str) -> Any:
        asked = CliRunner().invoke(replay_commands, list(words))
        return json.loads(asked.output) if asked.exit_code == 0 else str(asked.exception)

    answer = ask("rescore", str(folder), *chosen)
    query = "select count(*), sum(num_action_tokens) from trajectories where iteration = 4 and state = 'eligible'"
    ((count, tokens),) = rows(database, query)
    assert (answer["version"], answer["trajectories"], answer["tokens"]) == (4, count, tokens)
    assert 0 < answer["ess"] <= 1 and answer["token_gap_max"] > 0.0
    assert rows(database, "select count(distinct trajectory), min(policy_version) from token_scores") == [(count, 4)]
    # Each token has its own ratio.
    shown = [ask("show", id, str(folder), "--json")["segments"] for (id,) in rows(database, _OF_4)]
    ratios = [
        math.exp(now - then)
        for segment in itertools.chain.from_iterable(shown)
        for now, then in zip(segment["current_log_probs"], segment["behavior_log_probs"], strict=True)
        if now is not None and then is not None
    ]
    wanted = sum(ratios) ** 2 / (len(ratios) * sum(ratio**2 for ratio in ratios))
    assert len(ratios) == tokens and answer["ess"] == pytest.approx(wanted, abs=1e-6)
    # By the policy that sampled them, drift is 1.
    answer = ask("rescore", str(folder), "--policy", "3", *chosen)
    assert (answer["drift_mean"], answer["token_gap_max"], answer["ess"]) == pytest.approx((1.0, 0.0, 1.0), abs=1e-4)
    assert "--policy must be a version whose weights are still in" in ask("rescore", str(folder), "--policy", "77")


def evaluating(folder: Path, model: Path, keep: int, **sections: dict[str, object]) -> RunConfig:
    evaluation = {"every": 1, "tasks": 3, "samples": 2, "keep_episodes": keep}
    return small_config(folder, model, rollout={"max_turns": 1}, evaluation=evaluation, **sections)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> Path:
    return train(evaluating(tmp_path_factory.mktemp("kept"), qwen2, keep=2), display=SilentDisplay()).folder


def test_newest_evaluations_are_kept_with_what_was_said(kept: Path) -> None:
    database = kept / "replay.sqlite"
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
        # All ask for something of even length: a list shows what differs.
        assert found["rows"][0]["prompt"].startswith("\u2026 ")
        on_task = questions.held_out_task(store, run, found["rows"][0]["task"])
        assert [each["iteration"] for each in on_task["episodes"]] == [2, 2, 3, 3]
        known = rows(database, "select hash from tasks where payload like '%number%'")
        assert {row["task"] for row in found["rows"]} < {hash for (hash,) in known}
        # None of them is among what is drawn.
        trained = {row["task"] for row in questions.page(store, limit=500)["rows"]}
        assert trained.isdisjoint(row["task"] for row in found["rows"])


def test_run_is_the_same_whether_they_are_kept_or_not(kept: Path, tmp_path: Path, qwen2: Path) -> None:
    without = train(evaluating(tmp_path, qwen2, keep=0), display=SilentDisplay()).folder
    assert_same_bits(*(run / "policies/000003/model.safetensors" for run in (kept, without)))
    drawn = "select iteration, slot, probability, stream from draws order by iteration, slot"
    assert rows(kept / "replay.sqlite", drawn) == rows(without / "replay.sqlite", drawn)
    assert rows(without / "replay.sqlite", "select count(*) from held_out") == [(0,)]


def test_redacted_run_goes_on_and_leaves_neither_words_nor_tokens_hidden(tmp_path: Path, qwen2: Path) -> None:
    (tmp_path / "hide.py").write_text(REDACTOR)
    replay, display = {"fraction": 0.25, "redact": f"{tmp_path}/hide.py:hide"}, SilentDisplay()
    acting = {"environment": {"name": f"{PARITY}:Repeatable"}, "context": {"parser": f"{tmp_path}/hide.py:Asking"}}
    evaluation = {"every": 1, "tasks": 3, "keep_episodes": 1}
    config = small_config(tmp_path, qwen2, evaluation=evaluation, replay=replay, run={"iterations": 2}, **acting)
    database = train(config, display=display).folder / "replay.sqlite"
    assert rows(database, "select count(*) from iterations") == [(2,)]
    assert sum(row["tools/runs"] for row in display.iterations) > 0
    assert b"where jane lives" not in database.read_bytes()
    said = [json.loads(plain_text(said)) for (said,) in rows(database, "select said from messages")]
    assert {message["content"] for conversation in said for message in conversation} == {"hidden"}
    ((redacted,),) = rows(database, "select count(*) from trajectories where state_reason = 'redacted'")
    assert redacted == sum(row["buffer/redacted"] for row in display.iterations) > 0
    tokens = "select count(*) from segments where trajectory in (select id from trajectories where state = 'evicted')"
    assert rows(database, tokens) == [(0,)]
    with closing(ReplayStore.open(database, read_only=True)) as store:
        found = questions.held_out(store, store.run().id)["rows"]
    assert {(row["prompt"], row["answer"]) for row in found} == {("hidden", "hidden")}
