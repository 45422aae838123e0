"""A learner that would wait for workers goes on with replay alone, within both of its bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentloop.config import RunConfig
from tests.fakes.run_roles import ENGINE_ROLE, LEARNER, Roles, running_roles
from tests.fakes.runs import buffer_of, rows, save_qwen2, small_config

pytestmark = pytest.mark.slow

ITERATIONS, STALENESS, SAMPLES = 6, 2, 2.5


def config(folder: Path) -> RunConfig:
    return small_config(
        folder,
        save_qwen2(folder / "model"),
        run={"name": "small", "folder": str(folder), "iterations": ITERATIONS, "seed": 0},
        rollout={"engine": "vllm", "max_turns": 2, "max_tokens_per_turn": 12},
        engine={"urls": ["http://127.0.0.1:1"]},
        # What is evaluated in between would wait for workers, too.
        evaluation={"every": 0, "tasks": 8},
        loss={"fresh": {"anchor": "behavior"}},
        collection={"by": "workers", "max_staleness": STALENESS, "samples_per_insert": SAMPLES, "lease_s": 5},
    )


@pytest.mark.timeout(300)
def test_a_learner_whose_workers_are_away_replays_as_often_as_it_may(tmp_path: Path) -> None:
    roles = Roles(tmp_path, config(tmp_path))
    query = "select fresh, replay from iterations order by iteration"

    def sizes() -> list[tuple[int, int]]:
        return rows(buffer_of(roles.run), query) if roles.look() is not None else []

    with running_roles(roles, [ENGINE_ROLE, LEARNER, "worker-1"]):
        roles.until(lambda: len(sizes()) >= 2)
        roles.kill("worker-1")
        roles.until(lambda: any(fresh == 0 for fresh, _ in sizes()))
        roles.start("worker-2")
        roles.until(lambda: not roles.is_running(LEARNER))
        assert roles.processes[LEARNER].returncode == 0, roles.printed(LEARNER)
    made = sizes()
    assert len(made) == ITERATIONS
    assert {fresh + replay for fresh, replay in made} == {16}
    alone = [replay for fresh, replay in made if fresh == 0]
    mixed = [replay for fresh, replay in made if fresh > 0]
    assert alone
    # The first two are planned before there is a row; a quarter of each later one is replayed, whatever came between.
    assert mixed == [0, 0] + [4] * (ITERATIONS - len(alone) - 2)
    database = buffer_of(roles.run)
    assert rows(database, "select max(staleness) from draws where stream = 'fresh'")[0][0] <= STALENESS
    found = roles.look()
    assert found is not None
    assert (found.late, found.unused, found.failed, found.open) == (0, 0, 0, 0)
    assert sum(fresh + replay for fresh, replay in made) <= SAMPLES * found.done
