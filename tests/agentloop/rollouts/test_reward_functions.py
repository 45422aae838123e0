"""What reward functions are given, and which of them says what a success is."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentloop.config.sections.reward import RewardSection
from agentloop.environments import Task
from agentloop.errors import UserError
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.rewards import RewardScorer
from tests.agentloop.rollouts.test_rewards import FAILED, episode
from tests.fakes.environments import functions

FILE = Path(functions.__file__)


def scorer(*names: str | dict[str, Any], judges: bool = True, **reward: Any) -> RewardScorer:
    rows = [f"{FILE}:{name}" if isinstance(name, str) else name for name in names]
    return RewardScorer(RewardSection.model_validate({"functions": rows, **reward}), max_tokens=100, judges=judges)


def answered(content: str, answer: str = "42", stop_reason: str = "answered") -> Episode:
    said = episode(content, reward=0.0, stop_reason=stop_reason)
    return replace(said, task=Task("How many?", {"prompt": "How many?", "answer": answer}))


@pytest.mark.parametrize("name", ["right", "awaited"])
def test_function_is_given_columns_by_name(name: str) -> None:
    given = [
        answered("42"),
        answered("41"),
        answered("42", stop_reason="truncated"),
        FAILED,
    ]  # cut short: no answer
    assert scorer(name).score(given).totals[:3] == [1.0, 0.0, 0.0]


def test_function_with_defaults_or_with_all_columns() -> None:
    assert scorer("said").score([answered("It is 42.")]).totals == [0.5]
    assert scorer("columns").score([answered("42")]).totals == [2.0]


def test_first_function_judges_and_the_others_only_add_up() -> None:
    both = scorer("right", {"function": f"{FILE}:columns", "weight": -0.25})
    scores = both.score([answered("42"), FAILED, answered("41")])
    assert [scores.totals[0], scores.totals[2]] == [0.5, -0.5]  # 1 - 0.25 x 2 columns; 0 - 0.25 x 2
    assert [scores.episodes[0].environment_reward, scores.episodes[2].environment_reward] == [1.0, 0.0]
    assert scores.metrics == {"reward/right": 0.5, "reward/columns": 2.0}
    judged = both.judge([answered("42"), FAILED, answered("41")])
    assert [judged[0].environment_reward, judged[2].environment_reward] == [1.0, 0.0]
    assert judged[1] is FAILED
    shaped = scorer("right", judges=False).score([replace(answered("42"), environment_reward=0.25)])  # beside a class
    assert (shaped.totals, shaped.episodes[0].environment_reward) == ([1.25], 0.25)
    moody = scorer("moody", on_error="drop").judge([answered("a", answer="moody"), answered("b")])
    assert math.isnan(moody[0].environment_reward) and moody[1].environment_reward == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("of_lists", "got {FILE}:of_lists with 'completions', which is none. It is given one episode, no lists"),
        ("misspelt", "got {FILE}:misspelt with 'anser', which is none. Did you mean answer?"),
    ],
)
def test_function_that_asks_for_what_no_row_has_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        scorer(name).check(answered("42").task)
    scorer("right", "said", "columns", "awaited").check(answered("42").task)
    rule = "reward.functions must take one argument, the ended episode, and after it columns of the task by name, "
    assert str(caught.value).startswith(rule + message.replace("{FILE}", str(FILE)))
