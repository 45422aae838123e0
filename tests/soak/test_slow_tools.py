"""Tools that are slow now and then: workers run ahead, and what takes long is learned from as everything else is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from replay.store import ReplayStore
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.run_roles import ENGINE_ROLE, LEARNER, Roles, roles_config, running_roles
from tests.fakes.runs import buffer_of, rows, save_qwen2

pytestmark = pytest.mark.soak
ITERATIONS = 40
BOUNDS = (0, 1, 2, 4)
WORKERS = ("worker-1", "worker-2")
STRAGGLERS = ENVIRONMENTS / "slow_tools.py"
FRESH = """select t.id, d.iteration, d.staleness from draws d join trajectories t on t.id = d.trajectory
           where d.stream = 'fresh' and d.state = 'committed' order by d.iteration, d.slot"""


def late_calls(run: Path, ids: Sequence[str]) -> int:
    """How many of these episodes had a call that took long."""
    with closing(ReplayStore.open(buffer_of(run), read_only=True)) as store:
        return sum(any(message.content == "seen late" for message in row.messages) for row in store.read(ids))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("staleness", BOUNDS)
def test_slow_episodes_are_fresh_once_within_the_bound_and_none_is_left_out(tmp_path: Path, staleness: int) -> None:
    config = roles_config(
        tmp_path,
        save_qwen2(tmp_path / "model"),
        {"max_staleness": staleness, "lease_s": 10},
        run={"iterations": ITERATIONS},
        environment={"name": f"{STRAGGLERS}:Stragglers"},
        context={"parser": f"{STRAGGLERS}:Calling", "max_tokens": 800},
        rollout={"max_turns": 5},
        evaluation={"every": 0, "tasks": 1},
        checkpoint={"every": 20, "keep_policies": "none"},
    )
    roles = Roles(tmp_path, config)
    with running_roles(roles, [ENGINE_ROLE, LEARNER, *WORKERS]):
        roles.until(lambda: not roles.is_running(LEARNER), limit_s=600)
        assert roles.processes[LEARNER].wait() == 0, roles.printed(LEARNER)
    found = roles.look()
    assert found is not None
    database = buffer_of(roles.run)
    fresh = rows(database, FRESH)
    issued = rows(database, "select trajectory from tickets where purpose = 'train'")
    assert (found.late, found.unused, found.waiting, found.open) == (0, 0, 0, 0)
    assert (found.failed, found.revoked, found.fresh) == (0, 0, len(issued))
    assert sorted(id for id, *_ in fresh) == sorted(id for (id,) in issued)
    assert {iteration for _, iteration, _ in fresh} == set(range(1, ITERATIONS + 1))
    assert max(age for *_, age in fresh) <= staleness
    slow = late_calls(roles.run, [id for id, *_ in fresh])
    print(f"K={staleness}: {len(fresh)} fresh rows, {slow} slow")
    assert slow > 0.02 * len(fresh)
