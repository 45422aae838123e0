"""Several runs in one database of a server, with kills, takeovers, crashes and damage: none pays for another."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace

import pytest

from replay.records import ELIGIBLE
from tests.fakes.postgres_servers import LocalServer
from tests.fakes.records import FreshRows, new_store, sql, task
from tests.replay.storage.trainers import FRESH_ROWS, LIMITS, OWN, REPLACED, TAUGHT, TEACHER, Trainer, committed

pytestmark = pytest.mark.soak

ITERATIONS = 45
RUNS = tuple(f"run-{'i' * number}" for number in (1, 2, 3, 4))
FAULTS = ("kill",) * 18 + ("take over",) * 10 + ("crash",) * 4 + ("damage",) * 8


def teach(url: str) -> int:
    """Rows for all of them, fewer than they would like to use; how many."""
    with closing(new_store(url, TEACHER)) as store:
        collected = FreshRows(1, rates=(0.5,) * 20, run=TEACHER)
        taught = [replace(row, record=replace(row.record, source="teacher")) for row in collected.trajectories]
        return store.append([task()], collected.groups, taught).inserted


def damage(url: str, run: str, chance: random.Random) -> int:
    """A bit flips in the tokens of an own row of the run; how many rows that were."""
    rows = sql(url, "select id from trajectories where run = ? and state = ? order by id", run, ELIGIBLE)
    if not rows:
        return 0
    (id,) = chance.choice(rows)
    sql(url, "update segments set tokens = set_byte(tokens, 40, get_byte(tokens, 40) # 1) where trajectory = ?", id)
    return 1


def test_runs_that_share_a_server_keep_their_mixes_and_limits_through_every_fault(own_server: LocalServer) -> None:
    chance = random.Random(16)
    url = own_server.url(own_server.new_database())
    taught = teach(url)
    assert taught * int(LIMITS.max_uses or 0) < len(RUNS) * ITERATIONS * TAUGHT
    trainers = {run: Trainer.start(url, run, ITERATIONS) for run in RUNS}
    replaced: list[Trainer] = []
    damaged = killed = 0
    faults = list(FAULTS)
    chance.shuffle(faults)
    for fault in faults:
        time.sleep(chance.uniform(0.1, 0.8))
        run = chance.choice(RUNS)
        if fault == "kill":
            killed += trainers[run].kill()
            trainers[run] = Trainer.start(url, run, ITERATIONS)
        elif fault == "take over":
            replaced.append(trainers[run])
            trainers[run] = Trainer.start(url, run, ITERATIONS)
        elif fault == "crash":
            own_server.crash()
            own_server.start()
        else:
            damaged += damage(url, run, chance)
        check_limits(url)
    for trainer in [*trainers.values(), *replaced]:
        trainer.process.join()
    codes = Counter(trainer.process.exitcode for trainer in replaced)
    # One that had come to its end before it was replaced ends well, as does one that was killed later.
    assert set(codes) <= {0, REPLACED, -signal.SIGKILL}
    assert [trainer.process.exitcode for trainer in trainers.values()] == [0] * len(RUNS)
    for run in RUNS:
        check_mix(url, run)
    uses = check_limits(url)
    assert sum(uses[id] for (id,) in sql(url, "select id from trajectories where run = ?", TEACHER)) == taught * 3
    assert sql(url, "select count(*) from draws where state <> 'committed'") == [(0,)]
    assert sql(url, "select count(*) from trajectories where id like 'bad-%'") == [(0,)]
    print(
        f"{dict(Counter(faults))}, {killed} killed at work, replaced ended with {dict(codes)}, {damaged} rows damaged"
    )


def check_limits(url: str) -> Counter[str]:
    """At any moment: no row is used more often than allowed, nor again too soon by the same run. Uses by row."""
    draws = sql(url, "select run, iteration, trajectory, state from draws where stream = 'replay' order by 1, 2")
    uses = Counter(trajectory for _, _, trajectory, state in draws if state == "committed")
    assert max(uses.values(), default=0) <= (LIMITS.max_uses or 0)
    last: dict[tuple[str, str], int] = {}
    for run, iteration, trajectory, _ in draws:
        assert iteration - last.get((run, trajectory), -99) > (LIMITS.cooldown or 0)
        last[run, trajectory] = iteration
    return uses


def check_mix(url: str, run: str) -> None:
    """Every iteration is there once, with its fresh rows and its replayed ones in slots one after another."""
    assert committed(url, run) == ITERATIONS
    assert sql(url, "select count(*) from iterations where run = ?", run) == [(ITERATIONS,)]
    question = (
        "select d.iteration, d.slot, d.stream, coalesce(t.run, g.run) from draws d "
        "left join trajectories t on t.id = d.trajectory left join reclaimed r on r.id = d.trajectory "
        "left join groups g on g.id = r.group_id where d.run = ? order by 1, 2"
    )
    slots: dict[int, list[tuple[str, str]]] = {}
    for iteration, slot, stream, owner in sql(url, question, run):
        assert slot == len(slots.setdefault(iteration, []))
        slots[iteration].append((stream, owner))
    for iteration in range(1, ITERATIONS + 1):
        counts = Counter(slots[iteration])
        taught = counts.pop(("replay", TEACHER), 0)
        assert taught <= TAUGHT
        assert counts.pop(("fresh", run)) == FRESH_ROWS
        if iteration > 1:
            assert sum(counts.values()) == OWN
    stored = sql(url, "select iteration, fresh, replay from iterations where run = ? order by 1", run)
    assert stored == [(i, 8, len(slots[i]) - 8) for i in range(1, ITERATIONS + 1)]
