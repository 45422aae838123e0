"""The critic learns: one optimizer step of its own beside each of the policy's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentloop.algorithms.aggregation import token_weights
from agentloop.algorithms.value_loss import explained_variance, value_loss
from agentloop.config import RunConfig
from agentloop.errors import TrainingStopped
from agentloop.learning.batch import Batch
from agentloop.learning.mini_batches import cut_micro_batches
from agentloop.learning.optimizer import WeightOptimizer, learning_rate
from agentloop.learning.scoring import ScoredBatch
from agentloop.models.critic import Critic


@dataclass
class CriticLog:
    """What happened in the critic's optimizer steps of one update."""

    steps: int = 0
    skipped_no_signal: int = 0
    skipped_bad_gradient: int = 0
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    clipped: int = 0
    trained: int = 0

    def metrics(self) -> dict[str, float]:
        metrics = {
            "critic/skipped_no_signal": float(self.skipped_no_signal),
            "critic/skipped_bad_gradient": float(self.skipped_bad_gradient),
        }
        if self.losses:
            metrics["critic/vf_loss"] = sum(self.losses) / len(self.losses)
        if self.trained:
            metrics["critic/vf_clipfrac"] = self.clipped / self.trained
        if self.gradient_norms:
            metrics["critic/grad_norm"] = sum(self.gradient_norms) / len(self.gradient_norms)
        return metrics


class CriticLearner:
    """Owns the critic's optimizer."""

    def __init__(self, critic: Critic, config: RunConfig) -> None:
        self.critic = critic
        self._config = config
        self._optimizer = WeightOptimizer(critic.weights, config.critic.optimizer)

    def begin(self, *, iteration: int) -> float:
        """Of an update. The learning rate it goes by."""
        rate = learning_rate(self._config.critic.optimizer, iteration=iteration, iterations=self._config.run.iterations)
        self._optimizer.set_learning_rate(rate)
        self._optimizer.clear_gradients()
        return rate

    def accumulate(self, mini: ScoredBatch, log: CriticLog, *, backbone_share: float) -> float | None:
        """Add the gradient of the mini-batch's value loss to the critic's parameters; its loss, None without a token.

        The mean over the step's trained tokens, of fresh rows or of both streams (`critic.train_on`), each times its
        row's `loss_weights`: cutting the step into passes changes speed and memory only. `backbone_share` of the
        gradient reaches a shared backbone too, and is then the policy's optimizer's to apply.
        """
        batch, valued = mini.batch, mini.valued
        assert valued is not None, "a critic learns from a batch it has valued"
        mask = learned(batch, self._config)
        if not bool(mask.any()):
            return None
        weights = token_weights(
            mask,
            batch.trajectory,
            replay_mask=batch.replay_mask,
            mode="token-mean",
            norm_length=None,
            normalise="joint",
            replay_weight=1.0,
        )
        weights = weights * batch.loss_weights[:, None]
        loss = torch.zeros((), dtype=torch.float64, device=self.critic.device)
        clipped = torch.zeros((), dtype=torch.int64, device=self.critic.device)
        contributing = mask.any(dim=1).nonzero()[:, 0]
        lengths = batch.attention_mask[contributing].sum(dim=1).tolist()
        for cut in cut_micro_batches(lengths, self._config.batch.micro_batch_tokens, packs=self.critic.packs):
            positions = contributing[torch.tensor(cut, device=contributing.device)]
            part, width = mini.rows(positions), int(batch.attention_mask[positions].any(dim=0).sum())
            result = self._value_loss(part, mask[positions, :width], backbone_share)
            passed = (result[0] * weights[positions, :width]).sum()
            torch.autograd.backward(passed)
            loss += passed.detach()
            clipped += result[1].sum()
        log.clipped += int(clipped)
        log.trained += int(mask.sum())
        return float(loss)

    def _value_loss(self, part: ScoredBatch, mask: Tensor, backbone_share: float) -> tuple[Tensor, Tensor]:
        batch, valued = part.batch, part.valued
        assert valued is not None
        values, _ = self.critic.values(
            batch.token_ids, batch.attention_mask, batch.response_mask, backbone_share=backbone_share
        )
        result = value_loss(values, valued.values, valued.returns, mask=mask, value_clip=self._config.critic.value_clip)
        return result.loss, result.clipped

    def step(self, loss: float | None, log: CriticLog, *, iteration: int) -> None:
        """One optimizer step. Without a gradient, or with one that is not finite, it leaves everything as it is.

        Raises TrainingStopped for a loss or gradient that is not finite if `critic.optimizer.on_bad_gradient` is stop.
        """
        log.steps += 1
        if loss is None:
            self._optimizer.clear_gradients()
            log.skipped_no_signal += 1
            return
        norm = self._optimizer.gradient_norm()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._optimizer.clear_gradients()
            if self._config.critic.optimizer.on_bad_gradient == "stop":
                raise TrainingStopped(
                    f"value loss and its gradient must be finite, got loss {loss} and gradient norm {norm} in the "
                    f"critic's step {log.steps} of iteration {iteration}. Lower critic.optimizer.learning_rate, or "
                    "set critic.optimizer.on_bad_gradient: skip."
                )
            log.skipped_bad_gradient += 1
            return
        log.losses.append(loss)
        if norm == 0.0:
            self._optimizer.clear_gradients()
            log.skipped_no_signal += 1
            return
        log.gradient_norms.append(norm)
        self._optimizer.step(norm)

    def state(self) -> dict[str, Tensor]:
        """Weights and optimizer, live tensors: `weights/<name>` and `optimizer/<name>/<field>`."""
        weights = {f"weights/{name}": tensor for name, tensor in self.critic.weights.state_dict().items()}
        return weights | {f"optimizer/{name}": tensor for name, tensor in self._optimizer.state().items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Continue from `state()`, exactly. Raises ValueError if it belongs to another critic."""
        weights = {k.removeprefix("weights/"): t for k, t in tensors.items() if k.startswith("weights/")}
        known = self.critic.weights.state_dict()
        if {k: t.shape for k, t in weights.items()} != {k: t.shape for k, t in known.items()}:
            raise ValueError("critic state must belong to this critic, got the weights of another one.")
        self.critic.weights.load_state_dict(weights)
        moments = {k.removeprefix("optimizer/"): t for k, t in tensors.items() if k.startswith("optimizer/")}
        self._optimizer.load_state(moments)


def learned(batch: Batch, config: RunConfig) -> Tensor:
    """[B, T] bool: tokens whose value the critic learns."""
    if config.critic.train_on == "both":
        return batch.loss_mask
    return batch.loss_mask & ~batch.replay_mask[:, None]


def value_metrics(scored: ScoredBatch, config: RunConfig) -> dict[str, float]:
    """How well the critic knew, before it learned from them, the returns it is about to learn."""
    valued = scored.valued
    assert valued is not None
    mask = learned(scored.batch, config)
    values, targets = valued.values[mask].double(), valued.returns[mask].double()
    if len(values) == 0:
        return {}
    metrics = {"critic/value_mean": float(values.mean()), "critic/return_mean": float(targets.mean())}
    explained = explained_variance(values, targets)
    return metrics if explained is None else metrics | {"critic/explained_variance": explained}
