"""The head of a model returns log-probs instead of logits while the model is scored.

The head is replaced inside the model's own forward, where tied weights are one tensor and sharded weights are whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentloop.models.backbone_passes import forward_replaced
from agentloop.models.token_log_probs.chunked import ChunkSizes, head_log_probs

_PLAIN_BYTES = 64 * 1024**2
"""Bytes of a pass's logits in float32, up to which computing them once is cheaper than computing chunks twice."""


@dataclass(frozen=True, eq=False)
class ScoredTokens:
    """The N tokens that are scored."""

    places: Tensor
    """[N] int64: places of the predicting states among all states that reach the head, row after row."""
    targets: Tensor
    """[N] int64"""
    temperature: Tensor
    """[N]"""
    entropy: bool


class Head:
    """A model's head, and the way in which it makes log-probs.

    Some models change their logits after the head, or have a head of more than one product. Their log-probs are always
    made from whole logits.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @cached_property
    @torch.no_grad()
    def leaves_logits(self) -> bool:
        """True if the head is one plain product whose result the model returns. The model is tried with two tokens."""
        model: Any = self._model
        head = model.get_output_embeddings()
        # A sharded head is of a subclass with the same forward; a head with an adapter or a quantised one is not.
        own_forward = type(head).forward is not nn.Linear.forward or "forward" in vars(head)
        if not isinstance(head, nn.Linear) or own_forward or head.bias is not None:
            return False
        returned: list[Tensor] = []

        def noted(states: Tensor) -> Tensor:
            returned.append(nn.functional.linear(states, head.weight))
            return returned[-1]

        if model.training:
            model.train(False)
        with forward_replaced(head, noted):
            output = model(input_ids=torch.zeros((1, 2), dtype=torch.int64, device=model.device), use_cache=False)
        return len(returned) == 1 and output.logits is returned[0]

    def choose_chunks(self, count: int) -> ChunkSizes | None:
        """The chunks by which log-probs of `count` tokens are made; None: they are made from whole logits."""
        vocabulary = int(self._model.config.get_text_config().vocab_size)
        if 4 * count * vocabulary <= _PLAIN_BYTES or not self.leaves_logits:
            return None
        return ChunkSizes.for_device(self._model.device)

    def scores(
        self, asked: ScoredTokens, sizes: ChunkSizes, forward: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies [N] of the `asked` tokens; `forward` calls the model and returns its logits."""
        head: Any = self._model.get_output_embeddings()
        returned: list[Tensor] = []

        def scored(states: Tensor) -> Tensor:
            found = head_log_probs(
                states.flatten(0, -2).index_select(0, asked.places),
                head.weight,
                targets=asked.targets,
                temperature=asked.temperature,
                entropy=asked.entropy,
                sizes=sizes,
            )
            # One tensor, so that all that is differentiated passes the hooks of a sharded model.
            returned.append(torch.stack([values for values in found if values is not None], dim=-1))
            return returned[-1]

        with forward_replaced(head, scored):
            both = forward()
        if len(returned) != 1 or both is not returned[0]:
            raise RuntimeError("the model must return its head's result as logits, as when it was tried.")
        return both[:, 0], both[:, 1] if asked.entropy else None
