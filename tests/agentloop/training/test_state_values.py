"""Advantages of turns by what other trajectories earned from the same state."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentloop.config import RunConfig
from agentloop.environments import EnvironmentFactory, Task, load_environment
from agentloop.errors import UserError
from agentloop.learning.batch import build_batch
from agentloop.training.advantage_estimator import AdvantageEstimator
from agentloop.training.state_values import StateValues
from agentloop.training.train import train
from context.messages import Message, ToolCall
from replay.records import BatchRow
from tests.agentloop.learning.test_passes import written_formula
from tests.agentloop.training.test_advantage_estimator import rewarded
from tests.fakes.batch_rows import AUTHORS, LOSS, gradients, rescore, run_config, tiny_actor
from tests.fakes.processes import assert_same_run
from tests.fakes.runs import SilentDisplay, StopAfter, small_config

STATES = {"a": ("s", "t", "s"), "b": ("s", "u"), "c": ("t",), "d": ("v",), "e": None}
"""What each row passed; `e`'s messages can't be read."""
ROWS = [
    rewarded("a", 4.0, authors="ulelel", advantage=0.5),
    rewarded("b", 2.0, authors="ulel", advantage=-0.5),
    rewarded("c", 3.0, advantage=0.25, stream="replay"),
    rewarded("d", 1.0, advantage=1.0),
    rewarded("e", 1.0, advantage=0.75),
]


def values_of(states: Any, *, gamma: float = 0.5, max_age: int | None = None) -> StateValues:
    return StateValues(lambda rows: [states[row.id] for row in rows], gamma=gamma, max_age=max_age)


def by_states(rows: list[BatchRow], values: StateValues) -> tuple[list[BatchRow], dict[str, float]]:
    section = {"credit": "state", "turn_gamma": 0.5, "turn_coef": 2.0}
    config = RunConfig.model_validate({"algorithm": "opo", "advantage": section})
    return AdvantageEstimator(config, states=values).advantages_for_batch(rows, "stored")


def test_turns_are_measured_by_what_others_earned_from_their_state() -> None:
    values = values_of(STATES)
    values.add([row.trajectory for row in ROWS], iteration=1)
    rows, metrics = by_states(ROWS, values)
    # Returns: a 1, 2, 4 (of its two visits of s the first counts), b 1, 2, c 3. Terms x 2:
    # a: s 1 - 1, t 2 - 3, s again 4 - 1; b: s 1 - 1, u nobody else; c: t 3 - 2; d: nobody else; e unknown.
    expected = [[0, 0.5, 0, -1.5, 0, 6.5], [0, -0.5, 0, -0.5, 0, 0], [0, 2.25, 2.25], [0, 1, 1], [0, 0.75, 0.75]]
    found = build_batch(rows, AUTHORS).advantages
    assert found.tolist() == [row + [0] * (6 - len(row)) for row in expected]
    assert metrics == {"advantage/known_states": 5 / 7, "advantage/unknown_turns": 1.0}


def test_gradient_of_state_credit_is_that_of_the_written_formula() -> None:
    values = values_of(STATES)
    values.add([row.trajectory for row in ROWS], iteration=1)
    actor, config = tiny_actor(), run_config(loss=LOSS)
    scored = rescore(actor, by_states(ROWS, values)[0], old=actor)
    _, found, _ = gradients(actor, scored, config)
    _, expected = written_formula(actor, scored, config)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("max_age", [0, 2, None])
def test_values_are_means_over_the_rows_of_the_last_iterations(max_age: int | None) -> None:
    rng = np.random.default_rng(3)
    states = {f"{i}-{n}": tuple(rng.choice(list("xyz"), rng.integers(1, 6))) for i in range(1, 6) for n in range(4)}
    rewards = {name: float(rng.normal()) for name in states}
    rows = {name: rewarded(name, reward).trajectory for name, reward in rewards.items()}
    values = values_of(states, gamma=0.9, max_age=max_age)
    for i in range(1, 6):
        values.add([row for name, row in rows.items() if name[0] == str(i)], iteration=i)
    young = [name for name in states if max_age is None or 5 - int(name[0]) <= max_age]
    for name, terms in zip(rows, values.turn_terms(list(rows.values())), strict=True):
        for k, (state, term) in enumerate(zip(states[name], terms, strict=True)):
            others = [n for n in young if n != name and state in states[n]]
            returns = [0.9 ** (len(states[n]) - 1 - states[n].index(state)) * rewards[n] for n in others]
            own = 0.9 ** (len(states[name]) - 1 - k) * rewards[name]
            assert term == (pytest.approx(own - np.mean(returns), rel=1e-9, abs=1e-12) if others else None)


def test_equal_returns_are_exactly_no_signal() -> None:
    rows = [rewarded(name, 0.1).trajectory for name in "abcdefg"]
    values = values_of({row.id: ("s", "t") for row in rows}, gamma=0.7)
    values.add(rows, iteration=1)
    assert values.turn_terms(rows) == [(0.0, 0.0)] * 7


def conversation(task: Task, *shown: str, said: str = "x", number: str = "1") -> list[Message]:
    messages = list(task.messages())
    for content in shown:
        messages.append(Message("assistant", said, author="llm", tool_calls=(ToolCall("lookup", {}, number),)))
        messages.append(Message("tool", content, author="env", name="lookup", tool_call_id=number))
    return [*messages, Message("assistant", said, author="llm")]


def chains() -> tuple[EnvironmentFactory, Task]:
    factory = load_environment("lookup_chain", {})
    task = factory.make_task(random.Random(0))
    return factory, task


def test_state_is_the_task_and_what_was_shown_since_the_last_reply() -> None:
    factory, task = chains()

    def states(*shown: str, task_hash: str = "task", **more: Any) -> tuple[str, ...]:
        return factory.turn_states(task, conversation(task, *shown, **more), task_hash=task_hash)

    start, pearl, arrow = states("pearl", "arrow")
    assert len({start, pearl, arrow}) == 3
    assert states("arrow", "pearl", said="y", number="7") == (start, arrow, pearl)
    assert not {start, pearl, arrow} & set(states("pearl", "arrow", task_hash="another"))


def test_environment_names_its_states(monkeypatch: pytest.MonkeyPatch) -> None:
    factory, task = chains()
    monkeypatch.setattr(factory.environment, "state_key", lambda _, task, messages: str(len(messages) % 4 == 0))
    first, second, third = factory.turn_states(task, conversation(task, "pearl", "arrow"), task_hash="task")
    assert first == third != second
    monkeypatch.setattr(factory.environment, "state_key", lambda *_: 3)
    with pytest.raises(UserError, match="state_key must return a text or None, got 3"):
        factory.turn_states(task, conversation(task), task_hash="task")


@pytest.mark.slow
def test_resumed_run_with_state_credit_ends_like_the_unbroken_one(tmp_path: Path, qwen2: Path) -> None:
    """A buffer that holds less than an iteration's rows: values are of those that are gone from it, too."""
    section = {"credit": "state", "turn_gamma": 0.9, "state_max_age": 1}
    sections = {"advantage": section, "environment": {"task_pool": 2}, "replay": {"capacity": {"rows": 8}}}
    whole, stopped = (small_config(tmp_path / name, qwen2, **sections) for name in "ab")
    display = SilentDisplay()
    unbroken = train(whole, display=display)
    assert train(stopped, display=StopAfter(1)).iterations == 1
    assert_same_run(train(stopped, resume=True, display=SilentDisplay()).folder, unbroken.folder)
    assert all(row["advantage/known_states"] > 0.5 for row in display.iterations)
