"""Context strategies inside the loop: collected, stored, read back and made into batches, with a scripted policy."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentloop.config import RunConfig
from agentloop.config.sections.context import make_strategy
from agentloop.environments import EnvironmentFactory, Task, load_environment
from agentloop.learning.batch import build_batch
from agentloop.rollouts.trajectories import Collected
from context import loss_mask, response_mask
from replay.records import BatchRow, Trajectory
from replay.store import ReplayStore
from tests.agentloop.rollouts.collecting import collect
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.records import a_run, policy
from tests.fakes.scripted import CHATML, ScriptedGenerator, call, chain_of, scripted_actors

RUN = "run"


FACTORY = load_environment("lookup_chain", {"hops": [3, 3], "padding": 40})
TASK = FACTORY.make_task(random.Random(0))
SCRIPT = [call("lookup", f'{{"key": "{key}"}}') for key in chain_of(TASK, TASK.payload["key"])]
SCRIPT.append(f'The code is "{TASK.payload["code"]}".')
"""The perfect replies: look up each key of the chain, then answer."""


def collected(
    scripts: Sequence[Sequence[str]], factory: EnvironmentFactory = FACTORY, task: Task = TASK, **context: Any
) -> tuple[Collected, ScriptedGenerator, RunConfig]:
    limits = {"max_turns": 6, "max_tokens_per_turn": 200}
    config = RunConfig.model_validate({"rollout": limits, "context": {"max_tokens": 4000, **context}})
    section = config.context
    actors = scripted_actors(
        factory, scripts, authors=section.author_table(), strategy=make_strategy(section.strategy, section.options)
    )
    assert isinstance(actors.generator, ScriptedGenerator)
    return collect(actors, [(task, len(scripts))], config, run=RUN), actors.generator, config


@cache
def whole() -> Trajectory:
    """The script in one context."""
    (row,) = collected([SCRIPT])[0].trajectories
    return row


def stored(rows: Collected, config: RunConfig, folder: Path) -> list[Trajectory]:
    """What comes back from a database."""
    store = ReplayStore.create(folder / "replay.sqlite")
    authors = config.context.author_table()
    store.add_run(replace(a_run(RUN), authors=authors.to_json(), authors_hash=authors.hash))
    store.add_policy(policy(0, run=RUN))
    store.append(rows.tasks, rows.groups, rows.trajectories)
    return store.read([row.id for row in rows.trajectories])


def said(row: Trajectory, config: RunConfig) -> list[str]:
    """What is trained, as text, by segment."""
    authors = config.context.author_table()
    masks = [loss_mask(segment.tokens, authors) for segment in row.segments]
    ids = [s.tokens.token_ids[mask].tolist() for s, mask in zip(row.segments, masks, strict=True)]
    return [CHATML.codec.decode(part) for part in ids]


def test_memory_stores_the_question_as_a_fork_that_is_no_turn(tmp_path: Path) -> None:
    budget = whole().record.num_tokens - 100
    options = {"budget": budget, "max_summary_tokens": 60}
    asked = [*SCRIPT[:3], "next was here", SCRIPT[3]]
    rows, generator, config = collected([asked], strategy="memory", options=options)
    (row,) = stored(rows, config, tmp_path)
    assert (row.record.reward, row.record.num_turns, row.record.num_tool_calls) == (1.0, 4, 3)
    assert [segment.reason for segment in row.segments] == ["clean", "fork", "strategy_rewrite"]
    assert said(row, config)[1:] == ["next was here<|im_end|>", f"{SCRIPT[3]}<|im_end|>"]
    assert "next was here" in generator.prompts[0][4]
    assert rows.metrics()["context/rewrites/summarise"] == 1.0


def test_hint_is_seen_and_not_trained_on_and_its_log_probs_are_unknown(tmp_path: Path) -> None:
    rows, generator, config = collected([SCRIPT], strategy="hint")
    (row,) = stored(rows, config, tmp_path)
    assert "The trail:" in generator.prompts[0][0]
    (segment,) = row.segments
    assert "The trail:" not in CHATML.codec.decode(segment.tokens.token_ids.tolist())
    assert segment.behavior_context == "hinted"
    batch = build_batch([BatchRow(row, advantage=1.0)], config.context.author_table())
    assert bool(batch.behavior_log_probs.isnan().all())
    assert int(batch.loss_mask.sum()) == row.record.num_action_tokens > 0


def test_trajectories_of_several_segments_weigh_no_more_in_their_group() -> None:
    wrong = [SCRIPT[0], 'The code is "00".']
    budget = whole().record.num_tokens - 150
    rows, _, config = collected([SCRIPT, wrong], strategy="sliding_window", options={"budget": budget})
    assert [len(row.segments) for row in rows.trajectories] == [2, 1]
    assert (rows.rewrites, rows.metrics()["context/segments"]) == ({"drop_turns": 1}, 1.5)
    # Rewards 1 and 0: two members, mean 1/2, whatever the number of segments.
    assert (rows.groups[0].size, rows.groups[0].reward_mean) == (2, 0.5)
    batch = build_batch(
        [BatchRow(row, advantage=row.record.advantage) for row in rows.trajectories], config.context.author_table()
    )
    assert batch.trajectory.tolist() == [0, 0, 1]
    found = [float(batch.advantages[i][batch.loss_mask[i]].unique()) for i in range(3)]
    assert found == pytest.approx([rows.trajectories[0].record.advantage] * 2 + [rows.trajectories[1].record.advantage])


SPEAKERS = [
    {"name": "human_edit", "action": True, "trained": True},
    {"name": "subagent:planner", "action": True},
    {"name": "judge", "shown": False},
]
NAMES = [str(speaker["name"]) for speaker in SPEAKERS]


def test_words_of_registered_authors_are_stored_as_theirs_without_log_probs(tmp_path: Path) -> None:
    table = RunConfig.model_validate({"context": {"authors": SPEAKERS}}).context
    factory = load_environment(f"{ENVIRONMENTS / 'parity.py'}:Edited", {}, table.registered_authors())
    rows, _, config = collected([["done"]], factory, factory.make_task(random.Random(0)), authors=SPEAKERS)
    (row,) = stored(rows, config, tmp_path)
    authors, tokens = config.context.author_table(), row.segments[0].tokens
    assert [author.name for author in authors.authors[-3:]] == NAMES
    edited, asked, drawn = (tokens.authors == authors.code(name) for name in ("human_edit", "subagent:planner", "llm"))
    planner = '<tool_call>\n{"name": "lookup", "arguments": {"key": "pearl"}}\n</tool_call><|im_end|>'
    spoken = {"Behind 7 comes 8.<|im_end|>": edited, planner: asked, "done<|im_end|>": drawn}
    assert [CHATML.codec.decode(tokens.token_ids[mask].tolist()) for mask in spoken.values()] == list(spoken)
    assert (response_mask(tokens, authors) == edited | asked | drawn).all()
    assert (loss_mask(tokens, authors) == edited | drawn).all()
    assert (np.isnan(tokens.behavior_log_probs) == ~drawn).all() and ((tokens.policy_versions == -1) == ~drawn).all()
    assert "secret" not in CHATML.codec.decode(tokens.token_ids.tolist())
    assert [row.messages[place].author for place in (1, 3, 6)] == NAMES
    batch = build_batch([BatchRow(row, advantage=1.0)], authors)
    assert int(batch.loss_mask.sum()) == int((edited | drawn).sum())
