"""Tools that are slow now and then: workers run ahead, and what takes long is learned from as everything else is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentloop.config import RunConfig
from agentloop.training.train import train
from replay.store import ReplayStore
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.run_roles import ENGINE_ROLE, LEARNER, Roles, running_roles
from tests.fakes.runs import SilentDisplay, buffer_of, rows, save_qwen2, small_config

pytestmark = pytest.mark.soak
ITERATIONS = 40
BOUNDS = (0, 1, 2, 4)
WORKERS = ("worker-1", "worker-2")
ROLLOUT = {"max_turns": 5, "max_tokens_per_turn": 12, "temperature": 0.7}
STRAGGLERS = ENVIRONMENTS / "stragglers.py"
FRESH = """select t.id, t.num_tokens, d.iteration, d.staleness from draws d join trajectories t on t.id = d.trajectory
           where d.stream = 'fresh' and d.state = 'committed' order by d.iteration, d.slot"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("model"))


def slow_config(folder: Path, model: Path, **sections: dict[str, Any]) -> RunConfig:
    """A policy that an update changes in no bit, so that all runs of it sample from one distribution."""
    return small_config(
        folder,
        model,
        run={"iterations": ITERATIONS},
        environment={"name": f"{STRAGGLERS}:Stragglers"},
        context={"parser": f"{STRAGGLERS}:Calling", "max_tokens": 800},
        optimizer={"learning_rate": 1e-30},
        evaluation={"every": 0, "tasks": 1},
        checkpoint={"every": 20, "keep_policies": "none"},
        **{"rollout": ROLLOUT, **sections},
    )


@pytest.fixture(scope="module")
def by_loop(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[int]:
    """Lengths of all rows of a run whose loop waits for every episode, in tokens and in the order of their tasks."""
    config = slow_config(tmp_path_factory.mktemp("loop"), model, replay={"fraction": 0.0})
    run = train(config, display=SilentDisplay()).folder
    return [length for _, length, _, _ in rows(buffer_of(run), FRESH)]


def smirnov_p(one: Sequence[int], other: Sequence[int]) -> float:
    """How likely two samples of one distribution lie as far apart as these (Smirnov 1948, for large samples).

    Q(x) = 2 sum over k >= 1 of (-1)^(k-1) exp(-2 k^2 x^2), with x = D sqrt(n m / (n + m)) and D the largest distance of
    their distribution functions. Where values are equal it is too high rather than too low.
    """
    values = np.union1d(one, other)
    shares = [np.searchsorted(np.sort(sample), values, side="right") / len(sample) for sample in (one, other)]
    x = float(np.abs(shares[0] - shares[1]).max()) * math.sqrt(len(one) * len(other) / (len(one) + len(other)))
    if x < 0.2:  # the sum needs many terms, and is 1 to ten digits
        return 1.0
    return min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101)))


def test_the_distance_of_two_samples_has_its_probability() -> None:
    """D of 0.5 between 8 and 8 is x = 1: 2 (e^-2 - e^-8 + e^-18 - ...) = 0.27000, as tables of Q have it."""
    one, other = [1, 2, 3, 4, 5, 6, 7, 8], [5, 6, 7, 8, 9, 10, 11, 12]
    assert smirnov_p(one, other) == pytest.approx(0.27000, abs=5e-6)
    assert smirnov_p(one, one) == 1.0


def late_calls(run: Path, ids: Sequence[str]) -> int:
    """How many of these episodes had a call that took long."""
    with closing(ReplayStore.open(buffer_of(run), read_only=True)) as store:
        return sum(any(message.content == "seen late" for message in row.messages) for row in store.read(ids))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("staleness", BOUNDS)
def test_slow_episodes_are_fresh_once_within_the_bound_and_none_is_left_out(
    tmp_path: Path, model: Path, by_loop: list[int], staleness: int
) -> None:
    """Lengths are compared with those of a loop, which waits for all: as many, of the same tasks by the same policy.

    Within the run alone there is nothing to compare: every issued episode is learned from, which is tested exactly. Of
    four such tests one would fail by chance in five times at p > 0.05 each, so together they may fail once in twenty.
    """
    collection = {"by": "workers", "max_staleness": staleness, "lease_s": 10}
    config = slow_config(
        tmp_path,
        model,
        rollout={**ROLLOUT, "engine": "vllm"},
        engine={"urls": ["http://127.0.0.1:1"]},
        loss={"fresh": {"anchor": "behavior"}},
        collection=collection,
    )
    roles = Roles(tmp_path, config)
    with running_roles(roles, [ENGINE_ROLE, LEARNER, *WORKERS]):
        roles.until(lambda: not roles.is_running(LEARNER), limit_s=600)
        assert roles.processes[LEARNER].returncode == 0, roles.printed(LEARNER)
    found = roles.look()
    assert found is not None
    database = buffer_of(roles.run)
    fresh = rows(database, FRESH)
    issued = rows(database, "select trajectory from tickets where purpose = 'train'")
    assert (found.late, found.unused, found.waiting, found.open) == (0, 0, 0, 0)
    assert (found.failed, found.revoked, found.fresh) == (0, 0, len(issued))
    assert sorted(id for id, *_ in fresh) == sorted(id for (id,) in issued)
    assert {iteration for _, _, iteration, _ in fresh} == set(range(1, ITERATIONS + 1))
    assert max(age for *_, age in fresh) <= staleness
    lengths = [length for _, length, _, _ in fresh]
    chance = smirnov_p(lengths, by_loop[: len(lengths)])
    slow = late_calls(roles.run, [id for id, *_ in fresh])
    seconds = rows(database, "select sum(value) from metrics where name = 'time/iteration'")[0][0]
    ages = [sum(age == each for *_, age in fresh) for each in range(staleness + 1)]
    print(f"K={staleness}: {len(fresh)} fresh rows, {slow} slow; by staleness {ages}; p={chance:.3f}; {seconds:.1f} s")
    assert slow > 0.02 * len(fresh)
    assert chance > 0.05 / len(BOUNDS)
