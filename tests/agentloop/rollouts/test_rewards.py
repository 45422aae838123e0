import math
import random
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentloop.config.sections.reward import RewardSection
from agentloop.environments import LookupChain, Task
from agentloop.errors import UserError
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.rewards import RewardScorer
from context import Message, Segment, TokenSequence
from context.messages import ToolCall
from tests.fakes.environments import reward_functions

FUNCTIONS = Path(reward_functions.__file__)


def named(*functions: str | tuple[str, float]) -> list[dict[str, Any]]:
    pairs = [(entry, 1.0) if isinstance(entry, str) else entry for entry in functions]
    return [{"function": f"{FUNCTIONS}:{name}", "weight": weight} for name, weight in pairs]


def episode(content: str = "ok", *, reward: float = 1.0, tokens: int = 10, stop_reason: str = "answered") -> Episode:
    numbers = np.zeros(tokens, np.int32)
    sequence = TokenSequence(numbers, numbers.astype(np.uint8), np.full(tokens, np.nan, np.float32), numbers - 1)
    messages = (Message("user", "say something"), Message("assistant", content, author="llm"))
    return Episode(Task("say something"), (Segment(sequence),), messages, reward, stop_reason, None, None, 1, 0, (), {})


FAILED = replace(episode(), environment_reward=math.nan, stop_reason="engine_failure")


def scorer(*, max_tokens: int = 100, model: Any = None, **reward: Any) -> RewardScorer:
    return RewardScorer(RewardSection.model_validate(reward), max_tokens=max_tokens, model=model)


def test_environments_score_alone_is_the_reward_to_the_bit() -> None:
    scores = scorer().score([episode(reward=0.1), FAILED, episode(reward=-3.7)])
    assert scores.totals[0] == 0.1
    assert scores.totals[2] == -3.7
    assert math.isnan(scores.totals[1])
    assert scores.metrics == {}


def test_rewards_add_up_by_weight() -> None:
    scores = scorer(environment=2.0, functions=named(("brief", 3.0), ("judged", -0.5))).score(
        [episode("four", tokens=20), FAILED, episode("seven!!", reward=0.0, tokens=30)]
    )
    # 2 x 1 + 3 x -0.2 - 0.5 x 4 = -0.6; 2 x 0 + 3 x -0.3 - 0.5 x 7 = -4.4
    assert [scores.totals[0], scores.totals[2]] == pytest.approx([-0.6, -4.4], abs=1e-12)
    assert math.isnan(scores.totals[1])
    assert scores.metrics == pytest.approx(
        {"reward/environment": 0.5, "reward/brief": -0.25, "reward/judged": 5.5}, abs=1e-12
    )


def test_async_functions_wait_together_within_their_bound_and_keep_the_order() -> None:
    texts = ["a" * n for n in range(1, 10)]
    episodes = [episode(text, reward=0.0) for text in texts]
    assert scorer(parallel=3, functions=named("judged")).score(episodes).totals == [float(len(text)) for text in texts]
    for bound in (1, 3):
        assert max(scorer(parallel=bound, functions=named("crowd")).score(episodes).totals) == bound


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("picky", "ConnectionError: no answer"),
        ("endless", r"no end within reward.timeout_s=0.05 s"),
        ("waiting", r"no end within reward.timeout_s=0.05 s"),
        ("wordy", "got '1'"),
        ("several", r"got tensor\(\[1\., 2\.\]\)"),
        ("not_a_number_of_numpy", r"got np.float32\(nan\)"),
        ("nothing", "got None"),
    ],
)
def test_function_that_gives_no_number_stops_the_run_or_costs_the_episode(name: str, told: str) -> None:
    episodes = [episode("bad"), episode("good")][: 2 if name == "picky" else 1]
    with pytest.raises(UserError, match=rf"reward.functions must return a finite number.*{told}"):
        scorer(functions=named(name), timeout_s=0.05).score(episodes)
    forgiving = scorer(functions=named(name), timeout_s=0.05, on_error="drop")
    assert forgiving.can_fail
    lost, *others = forgiving.score(episodes).totals
    assert math.isnan(lost) and others in ([], [2.0])


@pytest.mark.parametrize("answer", [np.float32(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2), Decimal("0.5")])
def test_number_of_any_library_is_a_reward(answer: object, monkeypatch: pytest.MonkeyPatch) -> None:
    class Function:
        def __call__(self, episode: object) -> object:
            return answer

    monkeypatch.setattr("agentloop.rollouts.rewards.load_function", lambda spec, *, what: Function())
    (total,) = scorer(environment=0.0, functions=named("brief")).score([episode()]).totals
    assert type(total) is float
    assert total == 0.5


@pytest.mark.parametrize(
    ("tokens", "stop_reason", "cost"),
    [
        (80, "answered", 0.0),
        (85, "answered", -0.5),  # (85 - 80) / 20 x 2
        (100, "answered", -2.0),
        (12, "truncated", -2.0),
        (12, "context_full", -2.0),
        (12, "max_turns", 0.0),
    ],
)
def test_overlong_episodes_lose_more_the_longer_they_are(tokens: int, stop_reason: str, cost: float) -> None:
    shaped = scorer(max_tokens=100, overlong={"buffer": 20, "penalty": 2.0})
    scores = shaped.score([episode(reward=1.0, tokens=tokens, stop_reason=stop_reason)])
    assert scores.totals == [1.0 + cost]
    assert scores.metrics["reward/overlong"] == cost


class CountingModel:
    def score(self, conversations: Any) -> list[float]:
        return [float(len(messages)) for messages in conversations]


def test_model_scores_what_was_played() -> None:
    weighed = scorer(environment=0.0, model=CountingModel().score)
    assert weighed.score([FAILED, episode()]).totals[1] == 2.0
    section = RewardSection.model_validate({"environment": 0.0, "model": {"path": "somewhere", "weight": 0.5}})
    scores = RewardScorer(section, max_tokens=10, model=CountingModel().score).score([FAILED, episode()])
    assert scores.totals[1] == 1.0
    assert scores.metrics == {"reward/environment": 1.0, "reward/model": 2.0}


def test_lookup_chain_pays_each_step_of_the_trail() -> None:
    environment = LookupChain(hops=(3, 3))
    task = environment.make_task(random.Random(4))
    store, key = task.payload["store"], task.payload["key"]
    second = store[key]["next"]
    third = store[second]["next"]

    def call(*keys: str) -> Message:
        return Message("assistant", "", author="llm", tool_calls=tuple(ToolCall("lookup", {"key": k}) for k in keys))

    shown = Message("tool", "{}", author="env")
    said = [
        *task.messages(),
        call(key),
        shown,
        call(store[key]["see"]),
        shown,
        call(second),
        shown,
        call(second, third),
    ]
    answer = Message("assistant", "The code", author="llm")
    assert environment.turn_rewards(task, [*said, shown, answer]) == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3, 0])
