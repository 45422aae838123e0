"""A critic's values, what it makes of a batch, and how it learns beside the policy."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentloop.config import RunConfig
from agentloop.errors import TrainingStopped
from agentloop.learning.batch import build_batch
from agentloop.learning.critic_update import CriticLearner, CriticLog, with_values
from agentloop.models.actor import Actor
from agentloop.models.critic import Critic
from context.tokens.token_sequence import Segment
from replay.records import BatchRow
from tests.fakes.batch_rows import AUTHORS, batch_row, ragged, row, segment
from tests.fakes.tiny_actors import rescore, run_config, tiny_actor, trainer, weights_of, written_log_probs


def ppo(**sections: Any) -> RunConfig:
    return run_config(**{"algorithm": "ppo", **sections})


def critic_with_opinions(actor: Actor) -> Critic:
    """A new critic says 0 of everything; this one doesn't."""
    critic = Critic(actor)
    head = critic.weights["head"]
    assert isinstance(head, torch.nn.Linear)
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1.0, 1.0, head.weight.numel()).reshape(head.weight.shape))
        head.bias.fill_(0.25)
    return critic


def recorded(item: BatchRow, **changes: Any) -> BatchRow:
    record = replace(item.trajectory.record, **changes)
    return replace(item, trajectory=replace(item.trajectory, record=record))


def episodes() -> list[BatchRow]:
    """Mixed rows with rewards of their own; every third one was cut off."""
    return [
        recorded(item, reward=0.5 * index - 1.0, stop_reason="max_turns" if index % 3 == 0 else "answered")
        for index, item in enumerate(ragged())
    ]


def value_rows(actor: Actor, critic: Critic, item: Segment) -> list[float]:
    """Head x hidden state + bias behind every token of one segment alone."""
    head = critic.weights["head"]
    assert isinstance(head, torch.nn.Linear)
    ids = torch.from_numpy(item.tokens.token_ids.astype("int64"))[None]
    hidden = actor.model.base_model(input_ids=ids).last_hidden_state[0].detach()
    weight, bias = head.weight.detach()[0], head.bias.detach()[0]
    return [float((h * weight).sum() + bias) for h in hidden]


def test_value_of_a_token_is_read_where_its_logits_are() -> None:
    actor = tiny_actor()
    critic = critic_with_opinions(actor)
    items = [segment("uullel", seed=1), segment("ul", seed=2)]
    batch = build_batch([row(f"t{i}", item) for i, item in enumerate(items)], AUTHORS)
    values, behind = critic.values(batch.token_ids, batch.attention_mask, batch.response_mask)
    first, second = (value_rows(actor, critic, item) for item in items)
    # Action tokens 2, 3 and 5 are predicted from 1, 2 and 4; the other row's token 1 from 0.
    assert values[0].tolist() == pytest.approx([0.0, 0.0, first[1], first[2], 0.0, first[4]])
    assert values[1].tolist() == pytest.approx([0.0, second[0], 0.0, 0.0, 0.0, 0.0])
    assert behind.tolist() == pytest.approx([first[5], second[1]])


@pytest.mark.parametrize("bootstrap", [True, False])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_batch_is_valued_as_written(bootstrap: bool, estimator: str) -> None:
    """Score at the last action token less the KL penalty, GAE over the trajectory, returns: token by token."""
    actor, ref = tiny_actor(seed=0), tiny_actor(seed=1)
    critic, rows = critic_with_opinions(actor), episodes()
    section = {"gamma": 0.9, "gae_lambda": 0.8, "whiten_advantages": False, "bootstrap_truncated": bootstrap}
    config = ppo(critic=section, kl={"reward_coef": 0.05, "reward_estimator": estimator})
    before = rescore(actor, rows, old=actor, ref=ref)
    result = with_values(before, critic, config)
    assert before.ref_log_probs is not None
    assert result.returns is not None
    line = 0
    for item in rows:
        cells, values, rewards = [], [], []
        for part in item.trajectory.segments:
            states = value_rows(actor, critic, part)
            for t in result.batch.response_mask[line].nonzero()[:, 0].tolist():
                d = float(before.old_log_probs[line, t] - before.ref_log_probs[line, t])
                cells.append((line, t))
                values.append(states[t - 1])
                rewards.append(-0.05 * (d if estimator == "k1" else min(math.exp(-d) - 1 + d, 10.0)))
            line += 1
        record = item.trajectory.record
        rewards[-1] += record.reward
        values.append(states[-1] if bootstrap and record.stop_reason == "max_turns" else 0.0)
        for k, cell in enumerate(cells):
            advantage = sum(
                (0.9 * 0.8) ** step * (rewards[k + step] + 0.9 * values[k + step + 1] - values[k + step])
                for step in range(len(cells) - k)
            )
            # Advantages of the loss are float32.
            assert result.batch.advantages[cell].item() == pytest.approx(advantage, rel=1e-6, abs=1e-7)
            assert result.returns[cell].item() == pytest.approx(advantage + values[k], rel=1e-9)
    assert line == len(result.batch.trajectory)


def value_gradient(actor: Actor, rows: list[BatchRow], config: RunConfig) -> tuple[float, Tensor]:
    """Of the critic's loss by all of its weights."""
    critic = critic_with_opinions(actor)
    batch = with_values(rescore(actor, rows, old=actor), critic, config)
    learner = CriticLearner(critic, config)
    loss = learner.accumulate(batch, CriticLog())
    vectors = [torch.zeros_like(p) if p.grad is None else p.grad for p in critic.weights.parameters()]
    return loss, torch.cat([v.flatten() for v in vectors])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_critics_gradient_does_not_depend_on_the_passes(dtype: torch.dtype, tolerance: float) -> None:
    actor, results = tiny_actor(dtype), []
    for micro_batch_tokens in (10**6, 1, 30):
        config = ppo(batch={"micro_batch_tokens": micro_batch_tokens})
        results.append(value_gradient(actor, episodes(), config))
    whole_loss, whole = results[0]
    assert whole_loss > 0.01
    for loss, gradient in results[1:]:
        assert loss == pytest.approx(whole_loss, rel=tolerance)
        assert (gradient - whole).abs().max() <= tolerance * whole.abs().max()


def test_critic_learns_from_fresh_rows_alone() -> None:
    actor = tiny_actor()
    whole, without = episodes(), episodes()[:6]
    assert value_gradient(actor, whole, ppo())[0] == pytest.approx(value_gradient(actor, without, ppo())[0], rel=1e-9)


def test_kl_in_the_rewards_is_measured_on_fresh_tokens_alone() -> None:
    actor, reference, rows = tiny_actor(), tiny_actor(seed=1), episodes()
    batch = build_batch(rows, AUTHORS)
    old, ref = written_log_probs(actor, batch), written_log_probs(reference, batch)
    gaps = [(old[at] - ref[at]).item() for at in old if not batch.replay_mask[at[0]]]
    fresh = sum(gaps) / len(gaps)
    metrics = trainer(actor, ppo(kl={"reward_coef": 0.1}), reference=reference).update(rows, iteration=1).metrics
    assert metrics["actor/reward_kl"] == pytest.approx(fresh)


def test_steps_without_a_token_to_learn_from_are_in_no_value_loss() -> None:
    """A critic of fresh rows: three steps of them and three of replayed ones tell the mean of the first three."""
    rows = [batch_row(item.trajectory, "fresh" if i < 3 else "replay") for i, item in enumerate(episodes()[:6])]
    rows = [recorded(item, group=f"g{i}") for i, item in enumerate(rows)]
    config = ppo(batch={"mini_batch": 1}, critic={"optimizer": {"learning_rate": 1e-12}, "whiten_advantages": False})
    mixed = trainer(tiny_actor(), config).update(rows, iteration=1).metrics
    alone = trainer(tiny_actor(), config).update(rows[:3], iteration=1).metrics
    assert mixed["critic/skipped_no_signal"] == 3
    assert mixed["critic/vf_loss"] == pytest.approx(alone["critic/vf_loss"], rel=1e-6)
    replayed = trainer(tiny_actor(), config).update(rows[3:], iteration=1).metrics
    assert "critic/vf_loss" not in replayed


def test_critic_learns_to_explain_returns() -> None:
    """One reward for every episode with an even first token: after some updates the critic knows."""
    actor = tiny_actor(torch.float32)
    rows = [row(f"t{i}", segment("ulll", seed=i), group=f"g{i}") for i in range(24)]
    rows = [recorded(r, reward=float(r.trajectory.segments[0].tokens.token_ids[0] % 2 == 0)) for r in rows]
    section = {"gae_lambda": 1.0, "value_clip": None, "optimizer": {"learning_rate": 0.01, "schedule": "constant"}}
    learner = trainer(actor, ppo(critic={**section, "warmup_iterations": 100}, batch={"mini_batch": 24}))
    before = weights_of(actor)
    history = [learner.update(rows, iteration=i).metrics for i in range(1, 41)]
    assert history[0]["critic/explained_variance"] == pytest.approx(0.0)
    assert history[-1]["critic/explained_variance"] > 0.9
    assert history[-1]["critic/vf_loss"] < 0.1 * history[0]["critic/vf_loss"]
    assert torch.equal(weights_of(actor), before), "only the critic learns in its warm-up"
    assert history[0]["actor/held_steps"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_trainer_with_a_critic_equals_the_unbroken_one(dtype: torch.dtype) -> None:
    kl = {"reward_coef": 0.05}
    config = ppo(batch={"mini_batch": 4, "ppo_epochs": 2}, optimizer={"learning_rate": 0.01}, kl=kl)
    reference = tiny_actor(dtype, seed=3)
    actor = tiny_actor(dtype)
    learner = trainer(actor, config, reference=reference)
    for iteration in (1, 2):
        learner.update(episodes(), iteration=iteration)
    saved = {name: tensor.clone() for name, tensor in learner.state().items()}
    weights = {name: tensor.clone() for name, tensor in actor.model.state_dict().items()}
    last = learner.update(episodes(), iteration=3)

    resumed_actor = tiny_actor(dtype, seed=5)
    resumed_actor.model.load_state_dict(weights)
    resumed = trainer(resumed_actor, config, reference=reference)
    resumed.load_state(saved)
    again = resumed.update(episodes(), iteration=3)
    assert again.metrics == last.metrics
    assert again.advantages == last.advantages
    assert torch.equal(weights_of(resumed_actor), weights_of(actor))
    state, resumed_state = learner.state(), resumed.state()
    assert state.keys() == resumed_state.keys()
    assert all(torch.equal(state[name], resumed_state[name]) for name in state)


def test_state_of_another_critic_is_refused() -> None:
    one, other = trainer(tiny_actor(), ppo()), trainer(tiny_actor(num_hidden_layers=1), ppo())
    with pytest.raises(ValueError, match="critic state must belong to this critic"):
        other.load_state(one.state())


def test_value_loss_that_overflows_stops_the_run() -> None:
    rows = [recorded(item, reward=1e300, stop_reason="answered") for item in episodes()]
    with pytest.raises(TrainingStopped, match=r"loss and gradient must be finite, got loss inf .* by critic"):
        trainer(tiny_actor(), ppo(batch={"mini_batch": 4})).update(rows, iteration=1)
