"""Whole runs of each unit: what is in the database is what the rule says."""

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentloop.config import RunConfig
from agentloop.errors import TrainingStopped
from agentloop.training.train import TrainResult, train
from replay.config import stored_config
from replay.next_batch import changed, preview
from replay.questions.filters import condition
from replay.store import ReplayStore
from tests.fakes.processes import assert_same_run
from tests.fakes.records import sql
from tests.fakes.runs import SilentDisplay, StopAfter, rows, small_config

pytestmark = pytest.mark.slow

# A row for each trajectory of each batch, with its stream.
BATCHES = """select d.iteration, d.stream, t.task, t.group_id, t.iteration
             from draws d join trajectories t on t.id = d.trajectory order by d.iteration, d.slot"""


def pooled(folder: Path, model: Path, replay: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    """Four iterations of 4 tasks out of 4, 4 trajectories each; every second member replayed where possible."""
    return small_config(
        folder,
        model,
        run={"iterations": 4, **sections.pop("run", {})},
        environment={"task_pool": 4},
        replay={"fraction": 0.5, **replay},
        rollout={"max_turns": 1, "max_tokens_per_turn": 12},
        evaluation={"every": 0, "tasks": 1},
        checkpoint={"every": 100, "keep_policies": "none"},
        **sections,
    )


def batches(result: TrainResult) -> dict[int, list[tuple[Any, ...]]]:
    found: dict[int, list[tuple[Any, ...]]] = {}
    for iteration, *row in rows(result.folder / "replay.sqlite", BATCHES):
        found.setdefault(iteration, []).append(tuple(row))
    return found


def by_task(batch: list[tuple[Any, ...]]) -> list[tuple[int, int]]:
    """(fresh, replayed) members of each task of a batch."""
    streams = Counter((task, stream) for stream, task, _, _ in batch)
    return sorted((streams[task, "fresh"], streams[task, "replay"]) for task in {task for task, _ in streams})


@pytest.mark.parametrize(
    ("replay", "members", "fresh_group"),
    [
        ({"unit": "trajectory"}, [(2, 2)] * 4, 2),
        ({"unit": "task", "task_members": 3, "fraction": 0.375}, [(1, 3), (1, 3), (4, 0), (4, 0)], None),  # 6 of 16
        ({"unit": "group"}, [(0, 4), (0, 4), (4, 0), (4, 0)], 4),
    ],
    ids=["trajectory", "task", "group"],
)
def test_batches_have_the_members_that_the_unit_says(
    tmp_path: Path, qwen2: Path, replay: dict[str, Any], members: list[tuple[int, int]], fresh_group: int | None
) -> None:
    display = SilentDisplay()
    result = train(pooled(tmp_path, qwen2, replay, run={"iterations": 3}), display=display)
    found, replayed = batches(result), sum(old for _, old in members)
    got = rows(result.folder / "replay.sqlite", "select fresh, replay from iterations order by iteration")
    assert got == [(16, 0), (16 - replayed, replayed), (16 - replayed, replayed)]
    assert by_task(found[1]) == [(4, 0)] * 4
    assert all(by_task(found[iteration]) == members for iteration in (2, 3) if replay["unit"] != "group")
    for iteration in (2, 3):
        old = [(group, collected) for stream, _, group, collected in found[iteration] if stream == "replay"]
        assert all(collected < iteration for _, collected in old)
        assert replay["unit"] != "group" or set(Counter(group for group, _ in old).values()) == {4}
    # A group in the database is what the policy of one iteration did: replayed members are not counted in it.
    sizes = rows(result.folder / "replay.sqlite", "select distinct size from groups where iteration > 1")
    assert fresh_group is None or sizes == [(fresh_group,)]
    assert display.iterations[1]["replay/starved_rows"] == 0


def test_run_says_once_why_the_buffer_gives_fewer_rows_than_ruled(tmp_path: Path, qwen2: Path) -> None:
    display, nothing = SilentDisplay(), {"successful_only": True}
    folder = train(small_config(tmp_path, qwen2, replay=nothing, rollout={"success_reward": 2}), display=display).folder
    more = f"To see more: agentloop replay mix {folder}"
    limit = "source 'self' can give nothing: replay.successful_only leaves out the last of its 16 rows."
    assert [note for note in display.notes if note.startswith("the buffer gave ")] == [
        f"the buffer gave 0 of 4 rows: it has no row of an earlier iteration yet. {more}",
        f"the buffer gave 0 of 4 rows: {limit} {more}",
    ]


def spoiling(folder: Path) -> SilentDisplay:
    """Spoils every stored row after the first iteration: they are counted as there, and can't be read."""
    database = folder / "small-001" / "replay.sqlite"
    spoil = "update segments set tokens = zeroblob(length(tokens))"
    return SilentDisplay(at_iteration=lambda number: number > 1 or sql(database, spoil))


def test_run_whose_rows_go_bad_stops_over_its_limit_and_goes_on_without_them(tmp_path: Path, qwen2: Path) -> None:
    config = pooled(tmp_path, qwen2, {"unit": "task", "task_members": 4}, run={"iterations": 3})
    display = spoiling(tmp_path)
    limit = r"at most replay\.max_quarantined=0\.01 of the buffer, got 8 of 24 after iteration 2"
    with pytest.raises(TrainingStopped, match=limit):
        train(config, display=display)
    assert [row["buffer/quarantined"] for row in display.iterations] == [0, 8]
    database = tmp_path / "small-001" / "replay.sqlite"
    reasons = rows(database, "select state_reason from trajectories where state = 'quarantined'")
    assert len(reasons) == 8
    assert all("tokens with a wrong header" in reason for (reason,) in reasons)
    with pytest.raises(TrainingStopped, match="max_quarantined"):
        train(config, resume=True, display=SilentDisplay())
    with closing(ReplayStore.open(database)) as store:
        assert store.prune(rows=condition("state == 'quarantined'"), dry_run=False).rows == 8
    assert train(config, resume=True, display=SilentDisplay()).iterations == 3


def test_batch_that_was_to_be_all_replay_and_can_not_be_read_stops_the_run(tmp_path: Path, qwen2: Path) -> None:
    config = pooled(tmp_path, qwen2, {"fraction": 1.0, "max_quarantined": 1.0}, run={"iterations": 2})
    with pytest.raises(TrainingStopped, match=r"got none in iteration 2.*none of 16 rows could be read.*--resume"):
        train(config, display=spoiling(tmp_path))
    assert train(config, resume=True, display=SilentDisplay()).iterations == 2


def test_resumed_run_mixes_like_the_unbroken_one(tmp_path: Path, qwen2: Path) -> None:
    replay = {
        "unit": "trajectory",
        "fraction": 0.3,  # 4.8 of 16: remainders matter
        "start": {"success_rate": 0.01},
    }
    unbroken = train(pooled(tmp_path / "a", qwen2, replay), display=SilentDisplay())
    train(pooled(tmp_path / "b", qwen2, replay), display=StopAfter(2))
    resumed = train(pooled(tmp_path / "b", qwen2, replay), resume=True, display=SilentDisplay())
    assert_same_run(resumed.folder, unbroken.folder)


def test_preview_tells_the_very_rows_that_the_run_then_draws(tmp_path: Path, qwen2: Path) -> None:
    config = pooled(
        tmp_path, qwen2, {"fraction": 0.3, "sampler": "uniform", "successful_only": False}, run={"iterations": 3}
    )
    stopped = train(config, display=StopAfter(2))
    with closing(ReplayStore.open(stopped.folder / "replay.sqlite", read_only=True)) as store:
        answer = preview(store, folder=stopped.folder)
        unknown = preview(store)
        other = changed(stored_config(store.run()), {"unit": "trajectory"})
        guessed = preview(store, config=other, folder=stopped.folder)
    train(config, resume=True, display=SilentDisplay())
    query = "select trajectory, probability from draws where iteration = 3 and stream = 'replay' order by slot"
    drawn = rows(stopped.folder / "replay.sqlite", query)
    assert [(row["id"], row["probability"]) for row in answer["batch"]["rows"]] == drawn
    # 4.8 and 4.8 - 0.2 were rounded up to 5: 4.8 - 0.4 is 4. Without the run's folder nobody knows.
    assert (len(drawn), len(unknown["batch"]["rows"])) == (4, 5)
    # Which tasks come next is the run's affair.
    exact = [each["batch"]["exact"] for each in (answer, unknown, guessed)]
    assert exact == [True, False, False]
