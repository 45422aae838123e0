"""The head of a model, which returns log-probs instead of logits while the model is scored.

It happens inside the model's own forward: there tied weights are one tensor, and sharded ones are whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentloop.config.sections.model import ComputeSection
from agentloop.errors import UserError
from agentloop.models.backbone_passes import forward_replaced
from agentloop.models.token_log_probs.chunked import How, head_log_probs

_PLAIN_BYTES = 64 * 1024**2
"""Logits of a pass, in float32: fewer are cheaper to make once than twice."""


@dataclass(frozen=True, eq=False)
class ScoredTokens:
    """Which tokens are scored; N of them."""

    places: Tensor
    """[N] int64: of the predicting states among all that reach the head, rows one behind another."""
    targets: Tensor
    """[N] int64"""
    temperature: Tensor
    """[N]"""
    entropy: bool


class Head:
    """What a model's logits come of, and how log-probs are made there."""

    def __init__(self, model: PreTrainedModel, compute: ComputeSection) -> None:
        self._model = model
        self._chosen = compute.log_probs
        self._leaves_logits: bool | None = None
        """Whether they are the head's own result, asked of the model at first use."""

    def probe(self) -> None:
        """Ask now what would be asked at first use: of sharded weights all ranks must ask together."""
        if self._chosen != "plain":
            self._can_replace()

    def way(self, count: int) -> How | None:
        """How log-probs of `count` tokens are made from hidden states; None: from whole logits."""
        chosen: str = self._chosen
        if chosen == "auto":
            vocabulary = int(self._model.config.get_text_config().vocab_size)
            chosen = "chunked" if 4 * count * vocabulary > _PLAIN_BYTES else "plain"
        if chosen == "plain" or not self._can_replace():
            return None
        return How.on(self._model.device)

    def _can_replace(self) -> bool:
        if self._leaves_logits is None:
            self._leaves_logits = _leaves_logits(self._model)
        if not self._leaves_logits and self._chosen != "auto":
            raise UserError(
                f"compute.log_probs must be auto or plain for a model whose logits are not those of a plain linear "
                f"head, got {self._chosen} with {type(self._model).__name__}. Take it out."
            )
        return self._leaves_logits

    def scores(self, asked: ScoredTokens, how: How, forward: Callable[[], Tensor]) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies [N] of what is asked for, out of `forward`, which returns the model's logits."""
        head: Any = self._model.get_output_embeddings()
        returned: list[Tensor] = []

        def scored(states: Tensor) -> Tensor:
            found = head_log_probs(
                states.flatten(0, -2).index_select(0, asked.places),
                head.weight,
                targets=asked.targets,
                temperature=asked.temperature,
                entropy=asked.entropy,
                how=how,
            )
            # One tensor: all that is differentiated passes the hooks of a sharded model.
            returned.append(torch.stack([values for values in found if values is not None], dim=-1))
            return returned[-1]

        with forward_replaced(head, scored):
            both = forward()
        if len(returned) != 1 or both is not returned[0]:
            raise RuntimeError("the model must return what its head does, as it did when it was asked.")
        return both[:, 0], both[:, 1] if asked.entropy else None


@torch.no_grad()
def _leaves_logits(model: PreTrainedModel) -> bool:
    """True: the head is one plain product, and the model returns what it returned. Asked with two tokens."""
    head: Any = model.get_output_embeddings()
    # A sharded one is of a subclass with the same forward; an adapter's or a quantised one is not.
    is_plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and "forward" not in vars(head)
    if not is_plain or head.bias is not None:
        return False
    returned: list[Tensor] = []

    def noted(states: Tensor) -> Tensor:
        returned.append(nn.functional.linear(states, head.weight))
        return returned[-1]

    if model.training:
        model.train(False)
    with forward_replaced(head, noted):
        output: Any = model(input_ids=torch.zeros((1, 2), dtype=torch.int64, device=model.device), use_cache=False)
    return len(returned) == 1 and output.logits is returned[0]
