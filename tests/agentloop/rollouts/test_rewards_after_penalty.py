"""What whole rewards are charged for the distance to the reference, and where people see it."""

from __future__ import annotations

import math
import random

import pytest
import torch

from agentloop.algorithms.kl import KlCoefficient
from agentloop.config import RunConfig
from agentloop.environments import load_environment
from agentloop.learning.batch import build_batch, score
from agentloop.learning.critic_update import reward_penalty
from agentloop.models.actor import Actor
from agentloop.records import KlPenalty, Penalty, kl_metrics
from agentloop.rollouts.trajectories import Collected
from replay.records import BatchRow
from tests.agentloop.rollouts.collecting import collect
from tests.fakes.batch_rows import AUTHORS, row, run_config, segment, tiny_actor
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.scripted import LOG_PROB, scripted_actors

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
    penalty = reward_penalty(config, reference, AUTHORS, KlCoefficient(COEF, target=None, horizon=1))
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
    """Rewards are all 1; the second episode says what the greedy one says, so nothing sets it apart."""
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
