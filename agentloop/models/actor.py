"""The policy as the trainer sees it: tokens in, log-probs out."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from agentloop.algorithms.log_probs import Predictions, entropies, log_softmax, predictions
from agentloop.config.sections.model import ComputeSection
from agentloop.errors import UserError
from agentloop.models.backbone_passes import Passes, on_its_device
from agentloop.models.row_attention import Laid, has_flash
from agentloop.models.token_log_probs.head import Head, ScoredTokens


@dataclass(frozen=True)
class KeptForBackward:
    """Bytes that a pass with gradient keeps. They grow with its tokens alone, because attention keeps no scores."""

    fixed: int
    """Weights, in the type that the pass multiplies in."""
    per_token: int

    def bytes_for(self, tokens: int) -> int:
        return self.fixed + tokens * self.per_token


class Actor:
    """A causal language model that gives the log-probs of its tokens.

    The model is always in evaluation mode, with and without gradient. With dropout, the ratio of unchanged weights
    would not be 1.
    """

    def __init__(
        self, model: PreTrainedModel, *, packs: bool | None = False, compute: ComputeSection | None = None
    ) -> None:
        """With `packs` the rows of a pass follow one another without padding; None packs them where that is quicker."""
        self.model = model
        self.compute = on_its_device(compute or ComputeSection(), model)
        self._head = Head(model)
        self.passes = Passes(model.base_model, model.device, self.compute)
        if packs and not self.passes.can_pack:
            raise UserError(
                "batch.layout must be padded for a model whose attention is not full sdpa in every layer, got packed "
                f"with {type(model).__name__} ({model.config._attn_implementation}). Leave it out."
            )
        quicker = self.passes.can_pack and self.half_precision and has_flash(model.device)
        self.packs = quicker if packs is None else packs
        self.kept_for_backward: KeptForBackward | None = None
        """None until `models.memory` has measured it."""

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of log-probs: float32, or float64 for a float64 model."""
        return torch.float64 if self.model.dtype == torch.float64 else torch.float32

    @property
    def half_precision(self) -> bool:
        """Whether products are rounded to 16 bits, which differs between batches of different shapes."""
        return self.model.dtype.itemsize == 2 or self.compute.autocast != "none"

    def probe(self) -> None:
        """Try the head now instead of at first use, because all ranks of a sharded model must do so together."""
        _ = self._head.leaves_logits
        if isinstance(self.model, FSDPModule):
            # A pass without gradient leaves the outermost weights whole, and whole weights are never trained.
            self.model.reshard()

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

        Computed at each row's `temperature` [B] over the whole vocabulary, in float32 (float64 for a float64 model).
        Without `entropy` the second array is NaN on action tokens: large vocabularies make it expensive. Rows must be
        padded on the right: then causal attention alone keeps padding out of every result.
        """
        if bool((attention_mask[:, 1:] & ~attention_mask[:, :-1]).any()):
            raise ValueError("attention_mask must be padded on the right, got a real token after padding.")
        wanted = predictions(response_mask)
        if len(wanted.rows) == 0:
            zeros = torch.zeros(token_ids.shape, dtype=self.dtype, device=token_ids.device)
            return zeros, zeros
        laid, columns, places = self._lay_out(token_ids, attention_mask, wanted)
        asked = ScoredTokens(places, token_ids[wanted.rows, wanted.tokens], temperature[wanted.rows], entropy)
        sizes = self._head.choose_chunks(len(places))
        if sizes is None:
            chosen, uncertainty = _score_logits(self._forward(laid, columns), asked)
        else:
            chosen, uncertainty = self._head.scores(asked, sizes, lambda: self._forward(laid, columns))
        if uncertainty is None:
            uncertainty = torch.full_like(chosen, torch.nan, requires_grad=False)
        return _spread(chosen, response_mask), _spread(uncertainty, response_mask)

    def _lay_out(self, token_ids: Tensor, attention_mask: Tensor, wanted: Predictions) -> tuple[Laid, Tensor, Tensor]:
        """The pass, the columns whose states reach the head, and the places of the wanted predictions among these
        columns."""
        laid = self.passes.laid(token_ids, attention_mask, packs=self.packs)
        places = laid.places[wanted.rows, wanted.sources]
        if self.packs:
            return laid, places, torch.arange(len(places), device=places.device)
        rows, columns = wanted.rows * len(wanted.columns), wanted.columns
        return laid, columns, rows + torch.searchsorted(columns, wanted.sources)

    def _forward(self, laid: Laid, columns: Tensor) -> Tensor:
        """Logits at the given columns."""
        if self.model.training:
            self.model.train(False)
        with self.passes.open(laid):
            output: Any = self.model(**laid.inputs, logits_to_keep=columns, use_cache=False)
        logits: Tensor = output.logits
        return logits


def _score_logits(logits: Tensor, asked: ScoredTokens) -> tuple[Tensor, Tensor | None]:
    # index_select, not advanced indexing: its backward is an index_add instead of a sorting index_put.
    scores = log_softmax(logits.flatten(0, 1).index_select(0, asked.places), asked.temperature)
    chosen = scores.gather(1, asked.targets[:, None])[:, 0]
    return chosen, entropies(scores) if asked.entropy else None


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """Put values of the True positions, in order, back in their places."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
