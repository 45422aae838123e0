"""AdamW over the weights of a policy or a critic: its learning rate, its gradient's norm, its state."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from agentloop.config.learning import OptimizerSection

_MASTER = "master"


def learning_rate(section: OptimizerSection, *, iteration: int, iterations: int) -> float:
    """The scheduled learning rate of 1-based `iteration`; it depends on nothing else.

    Rises linearly over `warmup_iterations`, is at its peak in the iteration after them, and ends at
    `final_factor` of the peak in the last iteration.
    """
    warm_up = section.warmup_iterations
    if iteration <= warm_up:
        return section.learning_rate * iteration / (warm_up + 1)
    progress = min(1.0, (iteration - 1 - warm_up) / max(1, iterations - 1 - warm_up))
    course = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": (1.0 + math.cos(math.pi * progress)) / 2,
    }[section.schedule]
    factor = 1.0 if section.schedule == "constant" else section.final_factor + (1.0 - section.final_factor) * course
    return section.learning_rate * factor


class WeightOptimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) over the trainable parameters of a model.

    Half-precision weights are updated through float32 masters: next to a weight of 1, bfloat16 can't
    represent changes below 0.004, so small updates would be lost without a trace.
    """

    def __init__(self, model: nn.Module, section: OptimizerSection) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {
            name: p.detach().float().requires_grad_()
            for name, p in self._parameters.items()
            if p.dtype in (torch.bfloat16, torch.float16)
        }
        self._targets = {name: self._masters.get(name, p) for name, p in self._parameters.items()}
        self._max_norm = section.max_grad_norm
        self._adamw = torch.optim.AdamW(
            list(self._targets.values()),
            lr=section.learning_rate,
            betas=section.betas,
            weight_decay=section.weight_decay,
        )

    def set_learning_rate(self, rate: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = rate

    def gradient_norm(self) -> float:
        """Euclidean norm of all gradients together; NaN or inf if any of them is."""
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        return float(nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def clear_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self, gradient_norm: float) -> None:
        """Scale gradients of norm `gradient_norm` down to `max_grad_norm`, apply them and clear them."""
        scale = min(1.0, self._max_norm / gradient_norm)
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._targets[name].grad = parameter.grad.to(self._targets[name].dtype).mul_(scale)
        self._adamw.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                self._parameters[name].copy_(master)
                master.grad = None
        self.clear_gradients()

    def state(self) -> dict[str, Tensor]:
        """Moments, step counts and masters as `<parameter>/<field>`; live tensors, not copies."""
        tensors = {f"{name}/{_MASTER}": master.detach() for name, master in self._masters.items()}
        for name, target in self._targets.items():
            for field, value in self._adamw.state.get(target, {}).items():
                tensors[f"{name}/{field}"] = value
        return tensors

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Continue from `state()`, exactly. Raises ValueError if it belongs to another model."""
        fields: dict[str, dict[str, Any]] = {}
        for key, value in tensors.items():
            name, _, field = key.rpartition("/")
            fields.setdefault(name, {})[field] = value
        for name, state in fields.items():
            if name not in self._targets:
                raise ValueError(f"optimizer state must belong to this model, got a parameter {name!r} it lacks.")
            for field, value in state.items():
                if field != "step" and value.shape != self._targets[name].shape:
                    raise ValueError(
                        f"optimizer state {name}/{field} must have shape {list(self._targets[name].shape)}, "
                        f"got {list(value.shape)}. It belongs to another model."
                    )
        for name, master in self._masters.items():
            with torch.no_grad():
                master.copy_(fields.get(name, {}).pop(_MASTER, self._parameters[name]))
        self._adamw.state.clear()
        for name, target in self._targets.items():
            if fields.get(name):
                self._adamw.state[target] = {
                    # AdamW keeps its step counts on the CPU.
                    field: value.clone() if field == "step" else value.clone().to(target.device)
                    for field, value in fields[name].items()
                }
