"""An episode that begins inside a stored one continues as that one did, if the policy gives the same replies."""

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentloop.environments import EnvironmentFactory, RunEnvironments, Task, load_environment
from agentloop.rollouts.actors import tool_memory
from agentloop.rollouts.stored.restarts import RestartFinder
from agentloop.rollouts.stored.stored_episodes import StoredEpisodes, sampled_replies
from agentloop.rollouts.trajectories import Collected
from context import default_authors
from context.messages import content_hash
from context.tokens.loss_mask import loss_mask
from context.tokens.token_sequence import Segment
from replay.questions.filters import condition
from replay.records import Trajectory
from replay.store import ReplayStore
from tests.agentloop.rollouts.collecting import collect
from tests.agentloop.rollouts.stored.test_hindsight import FETCH_PLACE, RUN, played, random_episodes, settings
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.records import add_run
from tests.fakes.scripted import call, scripted_actors

RESTORED = f"{ENVIRONMENTS / 'counted.py'}:Restored"
SETTINGS, AUTHORS = settings(), default_authors()


def sums(count: int) -> tuple[EnvironmentFactory, list[Task], list[list[str]]]:
    """Scripts that add numbers up; some calls are unreadable or wrong."""
    factory, scripts, rng = load_environment(RESTORED, {}), [], random.Random(1)
    odd = ["<tool_call>\nnothing\n</tool_call>", call("grow", '{"n": "x"}'), call("shrink", '{"n": 1}')]
    for _ in range(count):
        calls = [call("grow", f'{{"n": {rng.randrange(100)}}}') for _ in range(rng.randint(1, 8))]
        scripts.append([rng.choice(odd) if rng.random() < 0.2 else said for said in calls] + ["Done."])
    return factory, [factory.make_task(rng) for _ in scripts], scripts


def sampled_elsewhere(row: Trajectory, rng: np.random.Generator) -> Trajectory:
    """The row with log-probs and versions that no other row has."""
    tokens, size = row.segments[0].tokens, len(row.segments[0].tokens)
    sampled = AUTHORS.has_behavior(tokens.authors)
    nats = np.where(sampled, -rng.exponential(size=size), np.nan).astype(np.float32)
    versions = np.where(sampled, rng.integers(0, 3, size), -1).astype(np.int32)
    return replace(row, segments=(Segment(replace(tokens, behavior_log_probs=nats, policy_versions=versions)),))


@contextmanager
def stored(folder: Path, factory: EnvironmentFactory, rows: Collected) -> Iterator[RestartFinder]:
    with closing(add_run(ReplayStore.create(folder / "replay.sqlite"), RUN)) as store:
        store.append(rows.tasks, rows.groups, rows.trajectories)
        yield RestartFinder(StoredEpisodes(RunEnvironments.from_factory(factory), store), AUTHORS, frozenset())


def assert_goes_on(row: Trajectory, parent: Trajectory, kept: int) -> None:
    record, (ours,), (theirs,) = row.record, row.segments, parent.segments
    assert (record.source, record.parent, record.kept_turns) == ("restart", parent.id, kept)
    assert row.messages == parent.messages
    facts = ("task", "reward", "success", "stop_reason", "error_kinds", "num_turns", "num_tool_calls", "num_tokens")
    assert [getattr(record, fact) for fact in facts] == [getattr(parent.record, fact) for fact in facts]
    assert np.array_equal(ours.tokens.token_ids, theirs.tokens.token_ids)
    for number, replies in enumerate(zip(*(sampled_replies([each], AUTHORS) for each in (ours, theirs)), strict=True)):
        if number < kept:
            reply, before = ([each.behavior_log_probs.tobytes(), each.policy_versions.tobytes()] for each in replies)
            assert reply == before
        assert loss_mask(replies[0], AUTHORS).tolist() == [number >= kept] * len(replies[0])


@pytest.mark.parametrize("cuts", [100, pytest.param(3400, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("name", ["lookup_chain", FETCH_PLACE, RESTORED])
def test_the_same_replies_behind_any_cut_are_answered_as_in_one_episode(name: str, cuts: int, tmp_path: Path) -> None:
    factory, tasks, scripts = sums(200) if name == RESTORED else random_episodes(name, 200)
    first = tool_memory(SETTINGS, RunEnvironments.from_factory(factory))
    rows = collect(scripted_actors(factory, scripts, memory=first), [(task, 1) for task in tasks], SETTINGS, run=RUN)
    draws, rng = np.random.default_rng(7), random.Random(7)
    rows.trajectories = [sampled_elsewhere(row, draws) for row in rows.trajectories]
    several = [place for place, script in enumerate(scripts) if len(script) > 1]
    answered = [] if first is None else first.take_new()
    with stored(tmp_path, factory, rows) as restarts:
        for _ in range(0, cuts, 100):
            memory = tool_memory(SETTINGS, RunEnvironments.from_factory(factory))
            if memory is not None:  # some calls of a prefix are known, and some of those behind it
                memory.add(rng.sample(answered, len(answered) // 2))
            chosen = [(place, rng.randrange(1, len(scripts[place]))) for place in rng.choices(several, k=100)]
            begun = [(restarts.behind(rows.trajectories[place].id, kept)[0], 1) for place, kept in chosen]
            actors = scripted_actors(factory, [scripts[place][kept:] for place, kept in chosen], memory=memory)
            found = collect(actors, begun, SETTINGS, run=RUN, iteration=2)
            for row, (place, kept) in zip(found.trajectories, chosen, strict=True):
                assert_goes_on(row, rows.trajectories[place], kept)


def test_episodes_that_are_answered_otherwise_now_are_left_out_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    factory, (task,), (script,) = random_episodes("lookup_chain", 1)
    rows = played(factory, [task], [script])
    with stored(tmp_path, factory, rows) as restarts:
        (restart,) = restarts.behind(rows.trajectories[0].id, 1)
    emptied = {**task.payload, "store": {key: {} for key in task.payload["store"]}}
    actors = scripted_actors(factory, [script[1:], script])
    found = collect(actors, [(replace(restart, payload=emptied), 1), (task, 1)], SETTINGS)
    assert (found.engine_failures, [row.record.source for row in found.trajectories]) == (1, ["self"])
    assert "what followed reply 1 of a stored episode must be the same again, got '{}'" in caplog.text


def test_no_restart_begins_in_a_held_out_task_or_in_a_success_evicted_after_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory, tasks, scripts = sums(2)
    rows = played(factory, tasks, scripts)
    gone, left = (row.id for row in rows.trajectories)
    with stored(tmp_path, factory, rows) as restarts:
        kept = {rows.trajectories[place].id: len(script) - 1 for place, script in enumerate(scripts)}
        assert {one.parent: len(one.turns) for one in restarts.choose(RUN, 5)} == kept
        held_out = {content_hash(tasks[0].payload)}
        assert [one.parent for one in replace(restarts, held_out=held_out).choose(RUN, 5)] == [left]
        monkeypatch.setattr("agentloop.rollouts.stored.restarts.restartable", lambda *_: [(gone, 1), (left, 1)])
        restarts.episodes.store.prune(rows=condition(f"id == '{gone}'"), dry_run=False)
        assert [one.parent for one in restarts.choose(RUN, 5)] == [left]
        emptied = [replace(row, messages=()) for row in rows.trajectories]
        assert [episode is None for episode in restarts.episodes.find(emptied)] == [True, False]


def test_a_success_is_not_begun_in_behind_a_failed_tool_that_would_be_called_again(tmp_path: Path) -> None:
    scripts = [[call("add", '{"n": 1}'), call("fail"), call("add", '{"n": 1}'), "Done."]]
    factory = load_environment(f"{ENVIRONMENTS / 'counted.py'}:Sums", {})
    rows = played(factory, [factory.make_task(random.Random(1))], scripts)
    with stored(tmp_path, factory, rows) as restarts:
        assert restarts.choose(RUN, 1) == []
        assert len(restarts.behind(rows.trajectories[0].id, 1)) == 1
