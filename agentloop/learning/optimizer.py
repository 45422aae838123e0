"""Updates the weights of a policy or critic: learning rate, gradient norm, and the optimizer's state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from agentloop.config import RunConfig
from agentloop.config.sections.optimization import BatchSection, OptimizerSection
from agentloop.errors import TrainingStopped

RECOMPUTED = "actor/old_log_probs_recomputed"
"""1 in an iteration in which stored log-probs were found to be too far off, and were recomputed."""
_HALF_PRECISION = (torch.bfloat16, torch.float16)
_MASTER = "master"
_MEANS = {"adamw": 2, "sgd": 1, "muon": 1}
"""Float32 values that each optimizer keeps for a parameter."""


def learning_rate(section: OptimizerSection, *, iteration: int, iterations: int) -> float:
    """Compute the scheduled learning rate of an iteration, counted from 1. It depends on nothing else.

    It rises linearly over `warmup_iterations`, is at its peak in the next iteration, and ends at `final_factor` of the
    peak in the last iteration.
    """
    warm_up = section.warmup_iterations
    if iteration <= warm_up:
        return section.learning_rate * iteration / (warm_up + 1)
    progress = min(1.0, (iteration - 1 - warm_up) / max(1, iterations - 1 - warm_up))
    if section.schedule == "constant":
        return section.learning_rate
    course = 1.0 - progress if section.schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return section.learning_rate * (section.final_factor + (1.0 - section.final_factor) * course)


def shrunk_factor(rows: int, batch: BatchSection) -> float:
    """The factor on the learning rate of a smaller batch: its rows per step, divided by the rows per step of a whole
    batch.

    Linear scaling (Goyal et al. 2017, arXiv 1706.02677): steps of few rows are noisy, and with a rate that is right for
    whole batches the policy swings. For AdamW, Malladi et al. (2022, arXiv 2205.10287) take the square root of this
    factor. docs/evidence.md measured the linear form.
    """
    whole = batch.trajectories
    made, planned = (count / math.ceil(count / batch.mini_batch) for count in (min(rows, whole), whole))
    return min(1.0, made / planned)


@dataclasses.dataclass
class StepLog:
    """A log of the optimizer steps of one update."""

    steps: int = 0
    skipped_no_signal: int = 0
    gradient_norms: list[float] = dataclasses.field(default_factory=list)

    def check_finite(self, optimizer: WeightOptimizer, loss: float, norm: float, *, key: str, iteration: int) -> None:
        """Raises TrainingStopped if loss or gradient is NaN or infinite; `key` is the section of the optimizer."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            optimizer.clear_gradients()
            raise TrainingStopped(
                f"loss and gradient must be finite, got loss {loss} and gradient norm {norm} in step {self.steps} of "
                f"iteration {iteration} by {key}. Lower {key}.learning_rate."
            )

    def apply(self, optimizer: WeightOptimizer, gradient_norm: float) -> None:
        """Make the step, unless its gradient is 0: it would still move the weights, by momentum and by weight decay."""
        if gradient_norm == 0.0:
            optimizer.clear_gradients()
            self.skipped_no_signal += 1
        else:
            self.gradient_norms.append(gradient_norm)
            optimizer.step(gradient_norm)

    def metrics(self, role: str) -> dict[str, float]:
        """`role`: actor or critic."""
        metrics = {f"{role}/skipped_no_signal": float(self.skipped_no_signal)}
        if self.gradient_norms:
            metrics[f"{role}/grad_norm"] = sum(self.gradient_norms) / len(self.gradient_norms)
        return metrics


@dataclasses.dataclass
class PolicyLog(StepLog):
    """A log of the policy's optimizer steps."""

    held: bool = False
    """True: the policy makes no steps in this iteration."""
    sampling_gap: float | None = None
    """Nats, root mean square: how far stored log-probs that stand for old ones are from those of the first step's
    passes, before any weight has moved; None: there are none."""
    kl_losses: list[float] = dataclasses.field(default_factory=list)

    def metrics(self, role: str = "actor") -> dict[str, float]:
        metrics = super().metrics(role)
        if self.sampling_gap is not None:
            metrics |= {"actor/sampling_gap": self.sampling_gap, RECOMPUTED: 0.0}
        if self.held:
            metrics["actor/held_steps"] = float(self.steps)
        if self.kl_losses:
            metrics["actor/kl_loss"] = sum(self.kl_losses) / len(self.kl_losses)
        return metrics


class WeightOptimizer:
    """One of torch's optimizers over the trainable parameters of a model, which may be sharded over ranks (FSDP2).

    `adamw` (Loshchilov & Hutter 2019, arXiv 1711.05101), `sgd` with momentum, `muon` (Jordan et al. 2024) for hidden
    matrices with AdamW for everything else. Muon's steps are scaled to the size of AdamW's (Liu et al. 2025, arXiv
    2502.16982), so that one learning rate is right for both.

    Half-precision weights are updated through float32 masters: next to a weight of 1, bfloat16 can't
    represent changes below 0.004, so small updates would be lost without a trace. For the same reason their gradients
    are summed over passes in float32.
    """

    def __init__(self, model: nn.Module, section: OptimizerSection) -> None:
        self.name, self._section = section.name, section
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        whole = [name for name, p in self._parameters.items() if not isinstance(p, DTensor)]
        if 0 < len(whole) < len(self._parameters):
            # Those are copies that a pass without gradient has left: they would never get a gradient.
            raise ValueError(f"parameters must be sharded all or none, got {whole[0]} whole. Reshard the model first.")
        sum_gradients_in_float32(self._parameters.values())
        self._masters = {
            name: p.detach().float().requires_grad_()
            for name, p in self._parameters.items()
            if p.dtype in _HALF_PRECISION
        }
        self._targets = {name: self._masters.get(name, p) for name, p in self._parameters.items()}
        self._max_norm = section.max_grad_norm
        matrices = hidden_matrices(model) if section.name == "muon" else frozenset()
        self._movers: dict[str, str] = {
            name: "adamw" if section.name == "muon" and name not in matrices else section.name
            for name in self._parameters
        }
        """The optimizer that moves each parameter."""
        self._optimizers = {
            mover: _torch_optimizer(mover, [t for n, t in self._targets.items() if self._movers[n] == mover], section)
            for mover in dict.fromkeys(self._movers.values())
        }

    def begin(self, iteration: int, config: RunConfig, *, rows: int) -> float:
        """Clear gradients, and set and return the learning rate for the steps of an iteration with `rows` rows."""
        rate = learning_rate(self._section, iteration=iteration, iterations=config.run.schedule_length)
        if config.replay.shortfall == "shrink":
            rate *= shrunk_factor(rows, config.batch)
        self.set_learning_rate(rate)
        self.clear_gradients()
        return rate

    def set_learning_rate(self, rate: float) -> None:
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = rate

    def gradient_norm(self) -> float:
        """Compute the Euclidean norm of all gradients together, over all ranks; NaN or inf if one of them is."""
        norm = nn.utils.get_total_norm([p.grad for p in self._parameters.values() if p.grad is not None])
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def clear_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def bytes_to_come(self) -> int:
        """Return the bytes that gradients and optimizer means will still take."""
        parts = [(target, self._movers[name]) for name, target in self._targets.items()]
        means = [0 if target in self._optimizers[mover].state else _MEANS[mover] for target, mover in parts]
        return sum(4 * target.numel() * (1 + kept) for (target, _), kept in zip(parts, means, strict=True))

    def bytes_of_state(self) -> int:
        """Return the bytes of `state()` once every parameter has been updated."""
        kept = {name: _MEANS[self._movers[name]] + (name in self._masters) for name in self._targets}
        return sum(4 * target.numel() * kept[name] for name, target in self._targets.items())

    def step(self, gradient_norm: float) -> None:
        """Scale gradients of norm `gradient_norm` down to `max_grad_norm`, apply them and clear them."""
        scale = min(1.0, self._max_norm / gradient_norm)
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._targets[name].grad = parameter.grad.to(self._targets[name].dtype).mul_(scale)
        for optimizer in self._optimizers.values():
            optimizer.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                self._parameters[name].copy_(master)
                master.grad = None
        self.clear_gradients()

    def state(self) -> dict[str, Tensor]:
        """Return moments, step counts and masters by `<parameter>/<optimizer>.<field>` and `<parameter>/master`.

        The tensors are not copies, and are sharded as the parameters are.
        """
        tensors = {f"{name}/{_MASTER}": master.detach() for name, master in self._masters.items()}
        for name, target in self._targets.items():
            mover = self._movers[name]
            for field, value in self._optimizers[mover].state.get(target, {}).items():
                tensors[f"{name}/{mover}.{field}"] = value
        return tensors

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Continue from `state()`, exactly; whole tensors are sharded as the parameters are.

        Raises ValueError if it belongs to another model or another optimizer.
        """
        masters: dict[str, Tensor] = {}
        fields: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            name, _, entry = key.rpartition("/")
            mover, _, field = entry.rpartition(".")
            is_master = entry == _MASTER and name in self._masters
            if not is_master and self._movers.get(name) != mover:
                raise ValueError(f"optimizer state must be that of {self.name} for this model, got {key}.")
            (masters if is_master else fields.setdefault(name, {}))[name if is_master else field] = value
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(_laid_like(masters.get(name, self._parameters[name]), master))
        for optimizer in self._optimizers.values():
            optimizer.state.clear()
        for name, state in fields.items():
            target = self._targets[name]
            # Step counts stay on the CPU, where torch keeps them.
            self._optimizers[self._movers[name]].state[target] = {
                field: value.clone() if field == "step" else _laid_like(value, target) for field, value in state.items()
            }


def sum_gradients_in_float32(parameters: Iterable[Tensor]) -> None:
    """Let the gradients of half-precision parameters add up over passes in float32; others are left alone.

    A bfloat16 sum has 8 bits: of thousands of passes most would be rounded away. It costs 2 more bytes per parameter
    while the passes go on.
    """
    for parameter in parameters:
        if parameter.dtype in _HALF_PRECISION and parameter.grad_dtype is not None:
            parameter.grad_dtype = None  # any dtype may be added, and to any
            parameter.register_post_accumulate_grad_hook(_to_float32)


def _to_float32(parameter: Tensor) -> None:
    """Convert the first pass's gradient; autograd and FSDP2 add later ones to it in place."""
    if parameter.grad is not None and parameter.grad.dtype in _HALF_PRECISION:
        parameter.grad = parameter.grad.float()


def _torch_optimizer(mover: str, targets: list[Tensor], section: OptimizerSection) -> torch.optim.Optimizer:
    rate, decay = section.learning_rate, section.weight_decay
    if mover == "sgd":
        return torch.optim.SGD(targets, lr=rate, momentum=section.momentum, weight_decay=decay)
    if mover == "muon":
        return torch.optim.Muon(
            targets, lr=rate, momentum=section.momentum, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
        )
    return torch.optim.AdamW(targets, lr=rate, betas=section.betas, weight_decay=decay)


def hidden_matrices(model: nn.Module) -> frozenset[str]:
    """Find the names of the trainable matrices between embeddings and head. Muon is made for these.

    A matrix of one row, such as a value head, counts as a vector. A parameter that is no layer's `weight` is left out:
    it is not multiplied with, for example a state space model's table of decays.
    """
    outside: set[int] = set()
    for module in model.modules():
        head = module.get_output_embeddings() if isinstance(module, PreTrainedModel) else None
        end = module if isinstance(module, nn.Embedding) else head
        outside |= {id(parameter) for parameter in end.parameters()} if end is not None else set()
    return frozenset(
        name
        for name, p in model.named_parameters()
        if p.requires_grad
        and p.ndim == 2
        and min(p.shape) > 1
        and name.rpartition(".")[2] == "weight"
        and id(p) not in outside
    )


def _laid_like(value: Tensor, target: Tensor) -> Tensor:
    """Copy a tensor to the device of `target`, sharded like `target`."""
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        return distribute_tensor(value.detach().to(target.device), target.device_mesh, target.placements)
    return value.detach().clone().to(target.device)
