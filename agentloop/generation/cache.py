"""Keys and values of running episodes, kept across turns.

Rows have different lengths, so new tokens are padded on the left; those columns are holes that no query sees. When
a turn begins, ended rows are dropped and the rest are packed to the left again, so holes do not pile up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from agentloop.generation.base import GenerationRequest

_GROWTH = 64


class EpisodeCache:
    """What a model has seen of a batch of episodes. Starts empty; `admit` or `keep` says whose turn it is."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # Windowed or recurrent layers count columns: holes would be wrong there, so such models start each turn anew.
        self._packs = _full_attention(model)
        self._makes_mask = self._packs and model.config._attn_implementation == "sdpa"
        self._states: Any = None
        self._fed: list[list[int]] = []
        self._row_of: dict[int, int] = {}
        self._real = torch.zeros((0, 0), dtype=torch.bool, device=model.device)
        self._length = torch.zeros((0,), dtype=torch.long, device=model.device)

    def fed(self, episode: int) -> int:
        """Tokens of this episode the model has already seen."""
        return len(self._fed[self._row_of[episode]])

    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        """Forget everything; these episodes begin from nothing."""
        if self._packs:
            self._states = Cache(layer_class_to_replicate=_PackedLayer)
        else:
            self._states = DynamicCache(config=self._model.config)
        self._fed = [[] for _ in requests]
        self._row_of = {request.episode: row for row, request in enumerate(requests)}
        self._real = torch.zeros((len(requests), 0), dtype=torch.bool, device=self._model.device)
        self._length = torch.zeros((len(requests),), dtype=torch.long, device=self._model.device)

    def keep(self, requests: Sequence[GenerationRequest]) -> bool:
        """Narrow to the requested episodes; False if any is new.

        Of an episode whose prompt was rewritten, what the old and the new prompt begin with is kept.
        """
        rows = [self._row_of.get(request.episode) for request in requests]
        known = [row for row in rows if row is not None]
        if not self._packs or len(known) < len(rows):
            return False
        fed = [_common(self._fed[row], request.prompt_ids) for request, row in zip(requests, known, strict=True)]
        self._length[torch.tensor(known)] = torch.tensor([len(ids) for ids in fed], device=self._length.device)
        self._pack(torch.tensor(known, device=self._model.device))
        self._fed = fed
        self._row_of = {request.episode: row for row, request in enumerate(requests)}
        return True

    def _pack(self, rows: Tensor) -> None:
        """Only these rows, their real columns at the left in order."""
        real, self._length = self._real[rows], self._length[rows]
        width = int(self._length.max())
        columns = torch.argsort((~real).to(torch.uint8), dim=1, stable=True)[:, :width]
        for layer in self._states.layers:
            layer.pack(rows, columns)
        self._real = torch.arange(width, device=rows.device)[None] < self._length[:, None]

    def feed(self, chunks: Sequence[list[int]]) -> Tensor:
        """Show each row its new tokens; the logits after the last one, [B, V]. An empty chunk leaves a hole."""
        width = max(len(chunk) for chunk in chunks)
        ids = torch.tensor([[0] * (width - len(chunk)) + chunk for chunk in chunks], device=self._model.device)
        sizes = torch.tensor([len(chunk) for chunk in chunks], device=ids.device)
        column = torch.arange(width, device=ids.device)
        new = column[None, :] >= width - sizes[:, None]
        positions = (self._length[:, None] + column[None, :] - (width - sizes[:, None])).clamp_min(0)
        before = self._real.shape[1]
        self._real = torch.cat([self._real, new], dim=1)
        self._length = self._length + sizes
        for row, chunk in zip(self._fed, chunks, strict=True):
            row.extend(chunk)
        output: Any = self._model(
            input_ids=ids,
            attention_mask=self._mask(before, width),
            position_ids=positions,
            past_key_values=self._states,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits
        return logits[:, -1]

    def _mask(self, before: int, width: int) -> Tensor:
        """[B, 1, width, all columns] for full attention, which saves the model its own; else the real columns."""
        if not self._makes_mask:
            return self._real
        columns = torch.arange(before + width, device=self._real.device)
        queries = columns[before:]
        causal = columns[None, :] <= queries[:, None]
        # A hole may look at itself: a query that sees nothing would give NaN.
        itself = columns[None, :] == queries[:, None]
        return ((causal[None] & self._real[:, None, :]) | itself[None])[:, None]


class _PackedLayer(DynamicLayer):
    """Grows by blocks instead of copying everything at every token."""

    keys: Tensor
    values: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._blocks = [key_states[..., :0, :], value_states[..., :0, :]]
        used = self.get_seq_length()
        end = used + key_states.shape[-2]
        for i, states in enumerate((key_states, value_states)):
            if self._blocks[i].shape[-2] < end:
                grown = _zeros(states, end + _GROWTH)
                grown[..., :used, :] = self._blocks[i][..., :used, :]
                self._blocks[i] = grown
            self._blocks[i][..., used:end, :] = states
        self.keys, self.values = (block[..., :end, :] for block in self._blocks)
        return self.keys, self.values

    def pack(self, rows: Tensor, columns: Tensor) -> None:
        """Take `columns` [rows, width] of each of `rows`."""
        self._blocks = [
            states[rows[:, None], :, columns].transpose(1, 2).contiguous() for states in (self.keys, self.values)
        ]
        self.keys, self.values = self._blocks


def _zeros(states: Tensor, columns: int) -> Tensor:
    # Not empty: a hole's garbage could be NaN, and 0 x NaN is NaN.
    return states.new_zeros((*states.shape[:-2], columns, states.shape[-1]))


def _common(fed: list[int], prompt: Sequence[int]) -> list[int]:
    """What both begin with, less than all of `prompt`: its last token has to be fed for its logits."""
    limit = min(len(fed), len(prompt) - 1)
    if list(prompt[:limit]) == fed[:limit]:
        return fed[:limit]
    return fed[: next(i for i in range(limit) if fed[i] != prompt[i])]


def _full_attention(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return all(kind == "full_attention" for kind in kinds)
    return getattr(config, "sliding_window", None) is None
