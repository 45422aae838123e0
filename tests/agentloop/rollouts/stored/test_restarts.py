"""An episode that begins inside a stored one goes on as the stored one did, where the same is said again."""

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentloop.config import RunConfig
from agentloop.environments import EnvironmentFactory, RunEnvironments, Task, load_environment
from agentloop.rollouts.actors import Actors, tool_memory
from agentloop.rollouts.stored.restarts import RestartFinder
from agentloop.rollouts.stored.stored_episodes import StoredEpisodes, sampled_replies
from agentloop.rollouts.trajectories import Collected
from context import default_authors
from context.messages import content_hash
from context.tokens.token_sequence import Segment, loss_mask, response_mask
from replay.records import Trajectory
from replay.store import ReplayStore
from tests.agentloop.rollouts.collecting import collect
from tests.agentloop.rollouts.stored.test_hindsight import FETCH_PLACE, Scripts, random_episodes
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.records import add_run
from tests.fakes.scripted import call, scripted_actors

RUN, VERSION = "run-1", 3
RESTORED = f"{ENVIRONMENTS / 'counted.py'}:Restored"
SETTINGS = RunConfig.model_validate(
    {"rollout": {"max_turns": 14, "max_tokens_per_turn": 200, "parallel": 1000}, "context": {"max_tokens": 4000}}
)


def sums(count: int) -> tuple[EnvironmentFactory, list[Task], list[list[str]]]:
    """Episodes that add numbers up, now and then with a call that can't be read, or is wrong."""
    factory, scripts = load_environment(RESTORED, {}), []
    for seed in range(count):
        rng = random.Random(seed)
        odd = ["<tool_call>\nnothing\n</tool_call>", call("grow", '{"n": "x"}'), call("shrink", '{"n": 1}')]
        calls = [call("grow", f'{{"n": {rng.randrange(100)}}}') for _ in range(rng.randint(1, 8))]
        scripts.append([rng.choice(odd) if rng.random() < 0.2 else said for said in calls] + ["Done."])
    return factory, [factory.make_task(random.Random(seed)) for seed in range(count)], scripts


def sampled_elsewhere(row: Trajectory, seed: int) -> Trajectory:
    """The row with log-probs and versions that no other row has."""
    (segment,), rng = row.segments, np.random.default_rng(seed)
    tokens = segment.tokens
    sampled = default_authors().has_behavior(tokens.authors)
    nats = np.where(sampled, -rng.exponential(size=len(tokens)), np.nan).astype(np.float32)
    versions = np.where(sampled, rng.integers(0, VERSION, len(tokens)), -1).astype(np.int32)
    return replace(row, segments=(Segment(replace(tokens, behavior_log_probs=nats, policy_versions=versions)),))


def acting(factory: EnvironmentFactory, scripts: Scripts, known: Actors | None = None) -> Actors:
    memory = tool_memory(SETTINGS, RunEnvironments.of_one(factory)) if known is None else known.memory
    return scripted_actors(factory, scripts, memory=memory)


def stored(folder: Path, factory: EnvironmentFactory, rows: Collected) -> tuple[ReplayStore, RestartFinder]:
    store = add_run(ReplayStore.create(folder / "replay.sqlite"), RUN)
    store.append(rows.tasks, rows.groups, rows.trajectories)
    return store, RestartFinder(StoredEpisodes(RunEnvironments.of_one(factory), store), default_authors(), frozenset())


def assert_goes_on(row: Trajectory, parent: Trajectory, kept: int) -> None:
    record, (ours,), (theirs,) = row.record, row.segments, parent.segments
    assert (record.source, record.parent, record.kept_turns) == ("restart", parent.id, kept)
    assert row.messages == parent.messages
    facts = ("task", "reward", "success", "stop_reason", "error_kinds", "num_turns", "num_tool_calls", "num_tokens")
    assert [getattr(record, fact) for fact in facts] == [getattr(parent.record, fact) for fact in facts]
    assert np.array_equal(ours.tokens.token_ids, theirs.tokens.token_ids)
    replies = [sampled_replies([segment], default_authors()) for segment in (ours, theirs)]
    for number, (reply, before) in enumerate(zip(*replies, strict=True)):
        if number < kept:
            assert reply.behavior_log_probs.tobytes() == before.behavior_log_probs.tobytes()
            assert reply.policy_versions.tobytes() == before.policy_versions.tobytes()
        assert response_mask(reply, default_authors()).all()
        assert loss_mask(reply, default_authors()).tolist() == [number >= kept] * len(reply)


@pytest.mark.parametrize("cuts", [100, pytest.param(3334, marks=pytest.mark.soak)])
@pytest.mark.parametrize("remembers", [True, False])
@pytest.mark.parametrize("name", ["lookup_chain", FETCH_PLACE, RESTORED])
def test_the_same_replies_behind_any_cut_are_answered_as_in_one_episode(
    name: str, remembers: bool, cuts: int, tmp_path: Path
) -> None:
    factory, tasks, scripts = sums(200) if name == RESTORED else random_episodes(name, 200)
    before = acting(factory, scripts)
    rows = collect(before, [(task, 1) for task in tasks], SETTINGS, run=RUN)
    rows.trajectories = [sampled_elsewhere(row, seed) for seed, row in enumerate(rows.trajectories)]
    several = [place for place, script in enumerate(scripts) if len(script) > 1]
    store, restarts = stored(tmp_path, factory, rows)
    rng = random.Random(7)
    with closing(store):
        for _ in range(0, cuts, 100):
            places = rng.choices(several, k=min(cuts, 100))
            kept = [rng.randrange(1, len(scripts[place])) for place in places]
            begun = [restarts.behind(rows.trajectories[place].id, n) for place, n in zip(places, kept, strict=True)]
            actors = acting(factory, [scripts[place][n:] for place, n in zip(places, kept, strict=True)], before)
            if not remembers:
                actors = replace(actors, memory=None)
            found = collect(actors, [(restart, 1) for (restart,) in begun], SETTINGS, run=RUN, iteration=2)
            for row, place, n in zip(found.trajectories, places, kept, strict=True):
                assert_goes_on(row, rows.trajectories[place], n)


def test_episodes_whose_tools_answer_otherwise_now_are_left_out_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    factory = load_environment(RESTORED.replace("Restored", "Forgetful"), {})
    script, task = [call("grow", '{"n": 1}'), "Done."], factory.make_task(random.Random(0))
    rows = collect(scripted_actors(factory, [script]), [(task, 1)], SETTINGS, run=RUN)
    store, restarts = stored(tmp_path, factory, rows)
    with closing(store):
        (restart,) = restarts.behind(rows.trajectories[0].id, 1)
    found = collect(scripted_actors(factory, [["Done."], script]), [(restart, 1), (task, 1)], SETTINGS, iteration=2)
    assert (found.engine_failures, [row.record.source for row in found.trajectories]) == (1, ["self"])
    assert "what followed reply 1 of a stored episode must be the same again, got '" in caplog.text


def test_a_success_of_a_held_out_task_is_not_begun_in(tmp_path: Path) -> None:
    factory, tasks, scripts = sums(1)
    rows = collect(acting(factory, scripts), [(tasks[0], 1)], SETTINGS, run=RUN)
    store, restarts = stored(tmp_path, factory, rows)
    with closing(store):
        kept = len(scripts[0]) - 1
        assert [(one.parent, len(one.turns)) for one in restarts.choose(RUN, 5)] == [(rows.trajectories[0].id, kept)]
        assert replace(restarts, held_out={content_hash(tasks[0].payload)}).choose(RUN, 5) == []
