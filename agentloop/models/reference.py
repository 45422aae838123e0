"""The policy that the KL is measured against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentloop.config import RunConfig
from agentloop.errors import UserError
from agentloop.models.actor import Actor
from agentloop.models.loading import has_adapters, load_model


class WithoutAdapters(Actor):
    """The actor's own model with its adapters switched off while it is scored: no second copy of the weights.

    What it stands for is the model below the adapters, which is the starting policy if they began at zero (LoRA's do).
    """

    def __init__(self, actor: Actor) -> None:
        if not has_adapters(actor.model):
            raise UserError(
                "kl.reference must not be adapter_off for a model without adapters, got adapter_off. Use copy, or "
                "set lora.rank."
            )
        super().__init__(actor.model, packs=actor.packs, compute=actor.compute)
        self._head = actor._head  # asked once for both: ranks that ask a sharded model must do it together

    def log_probs(self, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """As the actor's, without gradient."""
        self.model.disable_adapters()
        try:
            with torch.no_grad():
                return super().log_probs(*arguments, **named)
        finally:
            self.model.enable_adapters()


def reference_policy(config: RunConfig, first: Path | str, actor: Actor) -> Actor | None:
    """What the KL is measured against; None where no part of the configuration asks for it."""
    section = config.kl
    if section.loss_coef == 0.0 and section.reward_coef == 0.0:
        return None
    if section.reference == "adapter_off" or (section.reference == "auto" and has_adapters(actor.model)):
        return WithoutAdapters(actor)
    model = load_model(config.model, first).model
    model.requires_grad_(False)
    return Actor(model, packs=actor.packs, compute=actor.compute)
