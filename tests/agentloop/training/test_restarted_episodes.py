"""A run some of whose groups begin inside its own successes, from its folder alone."""

from pathlib import Path
from typing import Any

import pytest

from agentloop.config import RunConfig
from agentloop.training.train import TrainResult, train
from context import default_authors
from context.tokens.token_sequence import loss_mask, response_mask, runs_of
from replay.store import ReplayStore
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.processes import assert_same_run
from tests.fakes.replay_command import ask
from tests.fakes.runs import SilentDisplay, StopAfter, rows, small_config

pytestmark = pytest.mark.slow

PARITY = ENVIRONMENTS / "parity.py"


def restarting(folder: Path, model: Path, **replay: Any) -> RunConfig:
    return small_config(
        folder,
        model,
        run={"iterations": 4},
        environment={"name": f"{PARITY}:Repeatable"},
        context={"parser": f"{PARITY}:Hesitant", "max_tokens": 600},
        rollout={"max_turns": 5},
        batch={"trajectories": 20},
        replay={"restarts": {"enable": True, "fraction": 0.3}, **replay},
        evaluation={"every": 0, "tasks": 4},
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> tuple[TrainResult, SilentDisplay]:
    display = SilentDisplay()
    return train(restarting(tmp_path_factory.mktemp("run"), qwen2), display=display), display


def test_the_share_is_exact_over_iterations_and_what_is_missing_is_counted(
    finished: tuple[TrainResult, SilentDisplay],
) -> None:
    result, display = finished
    query = (
        "select iteration, count(distinct case source when 'restart' then group_id end), count(distinct group_id), "
        "avg(case source when 'self' then success end) from trajectories group by iteration"
    )
    found = rows(result.folder / "replay.sqlite", query)
    # 0.3 of 5, 4, 4 and 4 groups are 1.5, 1.2, 1.2 and 1.2: 1, 2, 1 and 1, of which the buffer has 0, 1, 1 and 1.
    assert [(restarted, groups) for _, restarted, groups, _ in found] == [(0, 5), (1, 4), (1, 4), (1, 4)]
    for (_, restarted, _, success), metrics in zip(found, display.iterations, strict=True):
        assert metrics.get("restarts/groups", 0) == restarted
        assert metrics["rollout/success"] == pytest.approx(success)
        assert metrics["batch/fresh_shortfall"] == 0
    assert [metrics["restarts/missing_groups"] for metrics in display.iterations] == [1, 1, 0, 0]


def test_kept_replies_are_not_trained_and_their_log_probs_are_computed_again(
    finished: tuple[TrainResult, SilentDisplay],
) -> None:
    database = finished[0].folder / "replay.sqlite"
    found = rows(
        database,
        "select t.id, t.kept_turns, t.parent, d.token_gap_max from trajectories t "
        "join draws d on d.trajectory = t.id and d.stream = 'fresh' where t.parent is not null",
    )
    assert len(found) == 9
    store = ReplayStore.open(database, read_only=True)
    for id, kept, parent, gap in found:
        ours, theirs = (row.segments[0].tokens for row in store.read([id, parent]))
        trained = loss_mask(ours, default_authors()).nonzero()[0]
        for field in ("token_ids", "behavior_log_probs", "policy_versions"):
            first, before = (getattr(tokens.part(0, int(trained[0])), field) for tokens in (ours, theirs))
            assert first.tobytes() == before.tobytes()
        sampled = runs_of(response_mask(ours.part(0, int(trained[0])), default_authors()))
        assert len(sampled) == kept > 0
        assert gap > 1e-4  # the weights have moved since
    store.close()


def test_lineage_names_the_success_and_what_was_kept(finished: tuple[TrainResult, SilentDisplay]) -> None:
    folder = finished[0].folder
    query = "select id, parent, kept_turns from trajectories where source = 'restart' limit 1"
    ((id, parent, kept),) = rows(folder / "replay.sqlite", query)
    said = f"source restart, from {parent}, {kept} of its replies kept"
    assert said in ask("lineage", id, folder).output
    assert said in ask("show", id, folder).output.replace("\n", "")
    assert f"made from it: {id}" in ask("lineage", parent, folder).output


def test_resumed_run_restarts_as_the_unbroken_one(
    finished: tuple[TrainResult, SilentDisplay], tmp_path: Path, qwen2: Path
) -> None:
    assert train(restarting(tmp_path, qwen2), display=StopAfter(2)).iterations == 2
    second = train(restarting(tmp_path, qwen2), resume=True, display=SilentDisplay())
    assert_same_run(second.folder, finished[0].folder)
