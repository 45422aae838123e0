"""The rewards of episodes, and the KL penalty of whole rewards for the distance to the reference."""

import asyncio
import math
import random
import re
from contextlib import nullcontext
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from agentloop.config import RunConfig
from agentloop.config.sections.reward import RewardSection
from agentloop.environments import Task, load_environment
from agentloop.errors import UserError
from agentloop.learning.batch import build_batch
from agentloop.learning.critic_update import reward_penalty
from agentloop.learning.passes import score
from agentloop.models.actor import Actor
from agentloop.records import KlPenalty, Penalty, kl_metrics
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.rewards import RewardScorer
from agentloop.rollouts.trajectories import Collected
from context import Message, Segment, TokenSequence
from replay.records import BatchRow
from tests.agentloop.rollouts.collecting import collect
from tests.fakes.batch_rows import AUTHORS, row, segment
from tests.fakes.environments import ENVIRONMENTS, functions
from tests.fakes.refusals import refusal_of
from tests.fakes.scripted import LOG_PROB, ScriptedGenerator, call, scripted_actors
from tests.fakes.tiny_actors import run_config, tiny_actor

FILE = functions.__file__


def named(*names: str | tuple[str, float]) -> list[dict[str, Any]]:
    pairs = [(entry, 1.0) if isinstance(entry, str) else entry for entry in names]
    return [{"function": f"{FILE}:{name}", "weight": weight} for name, weight in pairs]


def episode(content: str = "ok", *, reward: float = 1.0, tokens: int = 10, stop_reason: str = "answered") -> Episode:
    numbers = np.zeros(tokens, np.int32)
    sequence = TokenSequence(numbers, numbers.astype(np.uint8), np.full(tokens, np.nan, np.float32), numbers - 1)
    messages = (Message("user", "say something"), Message("assistant", content, author="llm"))
    return Episode(Task("say something"), (Segment(sequence),), messages, reward, stop_reason, None, None, 1, 0, (), {})


FAILED = replace(episode(), environment_reward=math.nan, stop_reason="engine_failure")


def scorer(*, judges: bool = False, **reward: Any) -> RewardScorer:
    return RewardScorer(RewardSection.model_validate(reward), judges=judges)


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
    found = scores.metrics
    assert found == pytest.approx({"reward/environment": 0.5, "reward/brief": -0.25, "reward/judged": 5.5}, abs=1e-12)


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


def test_error_of_a_function_shows_the_last_reply_and_how_an_episode_without_an_answer_ended() -> None:
    cut = episode("look", stop_reason="max_turns")
    cut = replace(cut, messages=(*cut.messages, Message("tool", "bad", author="env", name="find")))
    told = "the task 'say something' and the reply 'look'; it ended without an answer (max_turns). Mend it;"
    with pytest.raises(UserError, match=re.escape(told)):
        scorer(functions=named("picky")).score([cut])


def test_function_that_fails_ends_a_batch_with_its_first_episode() -> None:
    factory = load_environment("lookup_chain", {})
    scripts = [["bad"], [call("lookup", '{"key": "a"}'), "ok"], ["away"]]
    actors = scripted_actors(factory, scripts)
    config = run_config(reward={"functions": named("picky")}, context={"max_tokens": 4000})
    task = factory.make_task(random.Random(0))
    with pytest.raises(
        UserError,
        match=r"ConnectionError: no answer .*\. Mend it; raise agentloop.NotJudged .*; or set reward.on_error: drop\.$",
    ):
        collect(actors, [(task, 2)], config)
    assert isinstance(actors.generator, ScriptedGenerator)
    assert len(actors.generator.prompts[1]) < len(scripts[1])
    config = run_config(reward={"functions": named("picky"), "on_error": "drop"}, context={"max_tokens": 4000})
    found = collect(scripted_actors(factory, scripts), [(task, 3)], config)
    counted = (found.extra_metrics["rollout/reward_failures"], found.not_judged, found.engine_failures)
    assert (len(found.trajectories), *counted) == (1, 1.0, 1, 0)


@pytest.mark.parametrize("judges", [False, True], ids=["beside the environment", "in its place"])
def test_episode_that_a_function_can_not_judge_is_no_failure_of_the_policy(judges: bool) -> None:
    asked = scorer(judges=judges, functions=[*named("picky"), *named("brief")])
    scores = asked.score([episode("away"), FAILED, episode("good")])
    assert [math.isnan(total) for total in scores.totals] == [True, True, False]
    found = [(each.stop_reason, each.problem) for each in scores.episodes]
    assert found == [("not_judged", "the judge is away"), ("engine_failure", None), ("answered", None)]
    assert asked.judge([episode("away")])[0].failed == judges  # an evaluation asks the judge alone


@pytest.mark.parametrize(("judges", "fails"), [(False, False), (True, True)])
def test_evaluations_try_the_function_that_judges_alone(judges: bool, fails: bool) -> None:
    asked = scorer(judges=judges, functions=named("picky"))
    with pytest.raises(UserError, match="ConnectionError") if fails else nullcontext():
        asyncio.run(asked.try_on(episode("bad"), judges=True))
    with pytest.raises(UserError, match="ConnectionError"):
        asyncio.run(asked.try_on(episode("bad"), judges=False))


def test_number_of_any_library_is_a_reward_and_any_other_answer_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[object] = []
    monkeypatch.setattr("agentloop.rollouts.rewards.load_function", lambda spec, *, what: lambda episode: answers[-1])
    for number in (np.float32(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2), Decimal("0.5")):
        answers.append(number)
        (total,) = scorer(environment=0.0, functions=named("brief")).score([episode()]).totals
        assert type(total) is float and total == 0.5
    for other in ("1", torch.tensor([1.0, 2.0]), np.float32("nan"), None):
        answers.append(other)
        with pytest.raises(UserError, match=f"must return a finite number.*got {re.escape(repr(other))}"):
            scorer(functions=named("brief")).score([episode()])
        assert math.isnan(scorer(functions=named("brief"), on_error="drop").score([episode()]).totals[0])


# Columns of rows, and the function that says what a success is


def judging(*names: str | tuple[str, float], **reward: Any) -> RewardScorer:
    """A scorer whose first function judges."""
    return scorer(judges=True, functions=named(*names), **reward)


def answered(content: str, answer: str = "42", stop_reason: str = "answered") -> Episode:
    said = episode(content, reward=0.0, stop_reason=stop_reason)
    return replace(said, task=Task("How many?", {"prompt": "How many?", "answer": answer}))


@pytest.mark.parametrize("name", ["right", "awaited"])
def test_function_is_given_columns_by_name(name: str) -> None:
    cut_short = answered("42", stop_reason="truncated")  # no answer
    given = [answered("42"), answered("41"), cut_short, FAILED]
    assert judging(name).score(given).totals[:3] == [1.0, 0.0, 0.0]
    assert judging("said").score([answered("It is 42.")]).totals == [0.5]  # with a default
    assert judging("columns").score([answered("42")]).totals == [2.0]  # all of them


def test_first_function_judges_and_the_others_only_add_up() -> None:
    both = judging("right", ("columns", -0.25))
    scores = both.score([replace(answered("42"), agent_rewards={"scout": 0.5}), FAILED, answered("41")])
    assert scores.episodes[0].agent_rewards == {}
    assert [scores.totals[0], scores.totals[2]] == [0.5, -0.5]  # 1 - 0.25 x 2 columns; 0 - 0.25 x 2
    assert [scores.episodes[0].environment_reward, scores.episodes[2].environment_reward] == [1.0, 0.0]
    assert scores.metrics == {"reward/right": 0.5, "reward/columns": 2.0}
    judged = both.judge([answered("42"), FAILED, answered("41")])
    assert [judged[0].environment_reward, judged[2].environment_reward] == [1.0, 0.0]
    assert judged[1] is FAILED
    shaped = scorer(functions=named("right")).score(
        [replace(answered("42"), environment_reward=0.25)]
    )  # beside a class
    assert (shaped.totals, shaped.episodes[0].environment_reward) == ([1.25], 0.25)
    picky = judging("picky", on_error="drop").judge([answered("bad"), answered("good")])
    assert math.isnan(picky[0].environment_reward) and picky[1].environment_reward == 1.0


def test_function_that_asks_for_what_no_row_has_is_refused() -> None:
    said = refusal_of(judging("misspelt").check, answered("42").task)
    judging("right", "said", "columns", "awaited").check(answered("42").task)
    rule = "reward.functions must take one argument, the ended episode, and after it columns of the task by name, got "
    assert said == f"{rule}{FILE}:misspelt with 'anser', which is none. Did you mean answer?"


# The KL penalty of whole rewards


COEF = 0.1
KL = {"reward_coef": COEF}
NAN = math.nan
ROWS = [
    row("known", segment("ulul", [-1.0, -2.0])),
    row("partly", segment("uull", [NAN, -3.0], seed=1), stream="replay"),
    row("unknown", segment("ull", [NAN, NAN], seed=2), stream="replay"),
    row("demonstrated", segment("uxx", seed=3), stream="replay"),
]


def made_penalty(config: RunConfig, reference: Actor) -> Penalty:
    penalty = reward_penalty(config, reference, AUTHORS)
    assert penalty is not None
    return penalty


def test_tokens_of_unknown_behavior_pay_nothing() -> None:
    reference = tiny_actor()
    ref = score(reference, build_batch(ROWS, AUTHORS), max_tokens=64)[0]
    # k1 is log behavior - log ref, of the known tokens alone.
    nats = [-1.0 - ref[0, 1].item() + -2.0 - ref[0, 3].item(), -3.0 - ref[1, 3].item(), 0.0, 0.0]
    found = made_penalty(run_config(kl=KL), reference)([item.trajectory for item in ROWS])
    assert [charge.tokens for charge in found] == [2, 1, 0, 0]
    assert [charge.kl for charge in found] == pytest.approx(nats, rel=1e-6)
    assert [charge.amount for charge in found] == pytest.approx([COEF * kl for kl in nats], rel=1e-6)


def test_reward_kl_is_the_mean_over_tokens_and_absent_without_any() -> None:
    penalties = {"a": KlPenalty(0.3, 3.0, 2), "b": KlPenalty(0.1, 1.0, 6), "c": KlPenalty()}
    assert kl_metrics(penalties.values()) == {"actor/reward_kl": (3 + 1) / 8}
    assert Collected(kl_penalties={"c": KlPenalty()}).metrics() == {}
    assert kl_metrics([KlPenalty()]) == {}


def test_greedy_episode_of_remax_pays_like_the_sampled_ones() -> None:
    """All rewards are 1, and the second episode equals the greedy one, so its advantage is 0."""
    config = run_config(algorithm="remax", kl=KL, context={"max_tokens": 4000})
    factory = load_environment(f"{ENVIRONMENTS / 'faulty_tools.py'}:Graded", {})
    actors = scripted_actors(factory, [["yes", "no way"], ["no way"]])
    penalty = made_penalty(config, tiny_actor(torch.float64, vocab_size=actors.vocab_size))
    found = collect(actors, [(factory.make_task(random.Random(0)), 2)], config, penalty=penalty)
    one, same = (found.kl_penalties[trajectory.id] for trajectory in found.trajectories)
    assert abs(one.amount - same.amount) > 1e-3
    advantages = [trajectory.record.advantage for trajectory in found.trajectories]
    assert advantages == pytest.approx([same.amount - one.amount, 0.0], abs=1e-9)
    assert found.extra_metrics["rollout/greedy_reward"] == 1.0
    batch = build_batch([BatchRow(t) for t in found.trajectories], AUTHORS)
    known = batch.behavior_log_probs[batch.response_mask]
    assert known.tolist() == [LOG_PROB] * (one.tokens + same.tokens)
