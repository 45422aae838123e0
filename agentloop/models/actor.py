"""The policy as the trainer sees it: tokens in, log-probs out."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentloop.algorithms.log_probs import Predictions, entropies, log_softmax, predictions


class Actor:
    """A causal language model that scores its tokens.

    It is always scored in evaluation mode, with and without gradient: with dropout, the ratio of unchanged
    weights would not be 1.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._narrows_head = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Of log-probs: float32, or float64 for a float64 model."""
        return torch.float64 if self.model.dtype == torch.float64 else torch.float32

    def log_probs(
        self,
        token_ids: Tensor,
        attention_mask: Tensor,
        response_mask: Tensor,
        temperature: Tensor,
        *,
        entropy: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the action tokens, [B, T] nats, 0 where `response_mask` is False.

        Computed at each row's `temperature` [B] over the whole vocabulary, in float32 (float64 for a float64
        model). Without `entropy` the second array is NaN on action tokens: large vocabularies make it
        expensive. Rows must be padded on the right: then causal attention alone keeps padding out of every
        result.
        """
        if bool((attention_mask[:, 1:] & ~attention_mask[:, :-1]).any()):
            raise ValueError("attention_mask must be padded on the right, got a real token after padding.")
        wanted = predictions(response_mask)
        if len(wanted.rows) == 0:
            zeros = torch.zeros(token_ids.shape, dtype=self.dtype, device=token_ids.device)
            return zeros, zeros
        scores = log_softmax(self._logits(token_ids, wanted), temperature[wanted.rows])
        targets = token_ids[wanted.rows, wanted.tokens]
        chosen = scores.gather(1, targets[:, None])[:, 0]
        if entropy:
            uncertainty = entropies(scores)
        else:
            uncertainty = torch.full_like(chosen, torch.nan, requires_grad=False)
        return _spread(chosen, response_mask), _spread(uncertainty, response_mask)

    def _logits(self, token_ids: Tensor, wanted: Predictions) -> Tensor:
        """[N, V] logits of the wanted predictions; the head is applied only where some row needs it."""
        if self.model.training:
            self.model.train(False)
        inputs: dict[str, Any] = {"input_ids": token_ids, "use_cache": False}
        if self._narrows_head:
            columns = inputs["logits_to_keep"] = wanted.columns
        else:
            columns = torch.arange(token_ids.shape[1], device=token_ids.device)
        output: Any = self.model(**inputs)
        logits: Tensor = output.logits
        # index_select, not advanced indexing: its backward is an index_add instead of a sorting index_put.
        places = wanted.rows * len(columns) + torch.searchsorted(columns, wanted.sources)
        return logits.flatten(0, 1).index_select(0, places)


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """Values of the True positions, in order, back in their places."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
