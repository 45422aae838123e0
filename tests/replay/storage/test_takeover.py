"""Whoever resumes a run takes it over: the process that wrote it before can write nothing more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from replay import ReplayStore
from replay.errors import RunReplaced
from replay.sampling.samplers import make_sampler
from replay.storage.databases import Location
from replay.storage.format.schema import metadata
from replay.storage.retention import Capacity
from tests.fakes.records import RUN, FreshRows, iterate, iteration_record, new_store, policy, request, run_record, sql

OTHER = "run-2"
ZEROS = np.zeros(6, np.float32)


def commit(store: ReplayStore) -> None:
    store.commit(iteration_record(3, replay=0), FreshRows(3).draws(), sampler_state={})


WRITES: dict[str, Callable[[ReplayStore], Any]] = {
    "add_policy": lambda store: store.add_policy(policy(7)),
    "append": lambda store: FreshRows(4).append_to(store),
    "groups": lambda store: store.append([], FreshRows(4).groups, []),
    "reserve_fresh": lambda store: store.reserve_fresh(FreshRows(4).draws()),
    "draw": lambda store: store.draw(request(3, 2), make_sampler("uniform", 0)),
    "commit": commit,
    "add_metrics": lambda store: store.add_metrics(RUN, 2, {"eval/success": 0.5}),
    "add_scores": lambda store: store.add_scores(RUN, 1, {(FreshRows(3).trajectories[0].id, 0): ZEROS}),
    "evict": lambda store: store.evict(RUN, 3, policy_version=2, capacity=Capacity(rows=1)),
    "purge": lambda store: store.purge(RUN, 3),
    "refuse_replaced": lambda store: store.refuse_replaced(RUN),
}


def contents(store: ReplayStore) -> dict[str, list[tuple[Any, ...]]]:
    return {name: sorted(sql(store, f'select * from "{name}"'), key=repr) for name in metadata.tables}


def test_store_whose_run_was_resumed_by_another_writes_nothing_of_it(location: Location) -> None:
    store = new_store(location)
    sampler = make_sampler("uniform", 1)
    iterate(store, 1, sampler)
    store.resume(RUN, 1)
    iterate(store, 2, sampler)
    store.evict(RUN, 2, policy_version=1, capacity=Capacity(rows=1))
    other = ReplayStore.open(location)
    other.resume(RUN, 2)
    FreshRows(3).append_to(other)
    other.reserve_fresh(FreshRows(3).draws())
    before = contents(other)
    for name, write in WRITES.items():
        with pytest.raises(RunReplaced) as error:
            write(store)
        assert str(error.value) == (
            "run must be written by one process at a time, got epoch 2 where this process began epoch 1: "
            "run-1 was resumed by another one. Nothing of this call was stored; let the other one go on."
        ), name
    assert contents(other) == before
    # It may look, and the one that took over goes on.
    assert store.available(request(3, 2), make_sampler("uniform", 0)).rows > 0
    assert store.read([FreshRows(3).trajectories[0].id])[0].record.iteration == 3
    commit(other)
    for write in [WRITES[name] for name in WRITES if name != "commit"]:
        write(other)


def test_store_that_only_adds_to_a_run_outlives_its_resumes(location: Location) -> None:
    """An import, or a tool that scores rows: the run is somebody else's all the time."""
    trainer = new_store(location)
    trainer.resume(RUN, 0)
    tool = ReplayStore.open(location)
    tool.add_run(run_record())
    trainer.resume(RUN, 0)
    collected = FreshRows(1).append_to(tool)
    tool.add_scores(RUN, 1, {(collected.trajectories[0].id, 0): ZEROS})
    trainer.add_policy(replace(policy(1), checkpoint="policies/000001"))
