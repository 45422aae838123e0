"""An engine that fails: nothing of the reply is learned, nothing half is stored, and people are told."""

import logging
import math
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from agentloop.config import RunConfig
from agentloop.engines import Completion, GenerationFailed, GenerationRequest
from agentloop.environments import load_environment
from agentloop.errors import UserError
from agentloop.rollouts.actors import Actors
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.episodes.run_episodes import run_episodes
from agentloop.rollouts.evaluation import evaluate
from agentloop.rollouts.rewards import open_scorer
from agentloop.rollouts.trajectories import Collected
from agentloop.runs.display import describe_iteration
from agentloop.runs.run_folder import create_run_folder
from agentloop.training.components import build_components
from agentloop.training.loop import Loop
from agentloop.training.loop_state import LoopState
from agentloop.training.train import begin_run
from context import default_authors, loss_mask
from replay.store import ReplayStore
from tests.agentloop.rollouts.collecting import collect
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.records import add_run
from tests.fakes.runs import SilentDisplay, rows, small_config
from tests.fakes.scripted import CHATML, FlakyGenerator, ScriptedGenerator, call, scripted_actors

CONFIG = RunConfig.model_validate(
    {"rollout": {"max_turns": 3, "max_tokens_per_turn": 50}, "context": {"max_tokens": 4000}}
)
VOCAB = CHATML.codec.vocab_size
LOST = GenerationFailed("HTTP 500")
Script = list[str | Completion | GenerationFailed]


def graded(*scripts: Script) -> Actors:
    return scripted_actors(load_environment(f"{ENVIRONMENTS / 'faulty_tools.py'}:Graded", {}), scripts)


def collected(*groups: list[Script]) -> Collected:
    """A group for every list of scripts, each on a task of its own."""
    playing = graded(*(script for group in groups for script in group))
    rng = random.Random(0)
    tasks = [(playing.environments.all[0].make_task(rng), len(group)) for group in groups]
    return collect(playing, tasks, CONFIG)


def episode(*script: str | Completion | GenerationFailed) -> Episode:
    playing = graded([*script])
    (ended,) = run_episodes(playing, [playing.environments.all[0].make_task(random.Random(0))], CONFIG)
    return ended


def test_failed_members_leave_their_group_as_if_they_had_not_been_run(tmp_path: Path) -> None:
    # Rewards 1 and 0 (no answer within three turns) are left of four: mean and population deviation 1/2.
    silent = [call("count")] * 3
    rows = collected([[LOST], ["done"], [call("count"), LOST], list(silent)], [["done"], ["done"]])
    first, second = rows.groups
    assert (first.size, first.reward_mean, first.reward_std, first.success_rate) == (2, 0.5, 0.5, 0.5)
    assert (second.size, second.reward_mean) == (2, 1.0)
    records = [row.record for row in rows.trajectories]
    assert [record.group for record in records] == [first.id, first.id, second.id, second.id]
    # Both groups are of the same task, whose members count on.
    assert [(record.slot, record.member) for record in records] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    # GRPO over the two that are left: (1 - 1/2) / sqrt(1/2), their sample deviation, and its opposite.
    assert [record.advantage for record in records] == pytest.approx([0.7071, -0.7071, 0.0, 0.0], abs=1e-4)
    assert "engine_failure" not in {record.stop_reason for record in records}
    assert rows.metrics()["rollout/engine_failures"] == 2.0

    store = ReplayStore.create(tmp_path / "replay.sqlite")
    with closing(store):
        add_run(store, "run")
        store.append(rows.tasks, rows.groups, rows.trajectories)
        assert len(store.read([record.id for record in records])) == 4


@pytest.mark.parametrize(
    ("bad", "problem"),
    [(LOST, "HTTP 500"), (Completion((40, VOCAB), (-1.0, -1.0), 0), f"token {VOCAB} of a vocabulary of {VOCAB}")],
)
def test_reply_that_cannot_be_recorded_ends_its_episode_alone(bad: Completion | GenerationFailed, problem: str) -> None:
    ended = episode(call("count"), bad)
    assert (ended.stop_reason, ended.problem, ended.num_turns) == ("engine_failure", problem, 1)
    assert math.isnan(ended.environment_reward)
    # What it said before is what it said: one reply with its end token.
    (segment,) = ended.segments
    mask = loss_mask(segment.tokens, default_authors())
    assert CHATML.codec.decode(segment.tokens.token_ids[mask].tolist()) == f"{call('count')}<|im_end|>"
    assert [message.role for message in ended.messages][-2:] == ["assistant", "tool"]


def test_group_of_one_teaches_nothing_one_of_none_is_none_and_a_run_of_none_ends_with_one_line() -> None:
    rows = collected([[LOST], [LOST]], [["done"], [LOST]])
    ((row,), (group,)) = rows.trajectories, rows.groups
    assert (group.size, row.record.group, row.record.slot, len(rows.tasks)) == (1, group.id, 0, 1)
    assert (row.record.reward, row.record.advantage, rows.engine_failures) == (1.0, 0.0, 3)
    with pytest.raises(UserError, match=r"at least one of 2 episodes, got none \(HTTP 500\)\. Mend it\.$"):
        collected([[LOST], [call("count"), LOST]])


def test_engine_that_loses_track_of_its_requests_fails_them_all() -> None:
    class Forgetful(ScriptedGenerator):
        def generate(self, requests: list[GenerationRequest]) -> list[Completion | GenerationFailed]:  # type: ignore[override]
            return super().generate(requests)[:1]

    playing = replace(graded(), generator=Forgetful([["done"], ["done"]]))
    tasks = [playing.environments.all[0].make_task(random.Random(0))] * 2
    problems = [ended.problem for ended in run_episodes(playing, tasks, CONFIG)]
    assert problems == ["1 replies to 2 requests"] * 2


def test_reasons_are_shown_once_each_and_not_without_end(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        lost = [LOST, GenerationFailed("timed\nout"), LOST, *(GenerationFailed(f"request {i}") for i in range(30))]
        rows = collected([["done"], *([failure] for failure in lost)])
    assert rows.engine_failures == 33
    said = [record.getMessage() for record in caplog.records]
    reasons = ["HTTP 500", "timed out", *(f"request {i}" for i in range(18))]
    assert said[:20] == [f"episode ended with engine_failure: {reason}" for reason in reasons]
    assert said[20:] == ["further reasons are counted, and not shown"]


def test_run_and_evaluation_with_a_flaky_engine_go_on_with_what_it_let_through(tmp_path: Path, qwen2: Path) -> None:
    config = small_config(tmp_path, qwen2, replay={"fraction": 0.0}, evaluation={"every": 0})
    folder, display = create_run_folder(config), SilentDisplay()
    with closing(build_components(folder, display, checkpoint=None)) as parts:
        flaky = FlakyGenerator(parts.generator, nth=5)
        actors, scorer = replace(parts.actors, generator=flaky), open_scorer(config, parts.actors.environments)
        loop = Loop(replace(parts, collector=replace(parts.collector, actors=actors)), LoopState())
        begin_run(loop.components, None)
        loop.iterate(1)
        (metrics,), lost = display.iterations, flaky.lost
        result = evaluate(actors, parts.source, config, scorer=scorer)
        assert 0 < flaky.lost - lost == result.engine_failures == result.metrics()["eval/engine_failures"]
        assert result.tasks == 8 - result.engine_failures
        flaky.dead = True
        with pytest.raises(UserError, match="connection refused"):
            evaluate(actors, parts.source, config, scorer=scorer)
    assert 0 < lost < 16
    assert metrics["rollout/engine_failures"] == metrics["batch/fresh_shortfall"] == lost
    assert f"fresh {16 - lost} + replay 0  {lost} lost to the engine" in describe_iteration(1, 1, metrics, "")
    database = folder.database
    sizes = "select g.size, count(t.id) from groups g join trajectories t on t.group_id = g.id group by g.id"
    assert all(size == count for size, count in rows(database, sizes))
    assert rows(database, "select fresh, planned_fresh from iterations") == [(16 - lost, 16)]
