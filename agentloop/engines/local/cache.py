"""The key-value cache of running episodes, across their turns.

Rows have different numbers of new tokens, so the tokens are padded on the left. A padded column is a hole that no query
sees. When a turn begins, ended rows are dropped and the others packed to the left, so holes do not add up.

A hole costs as much as a token. So the common beginning of all first prompts is computed once, and rows with more new
tokens than most are first fed their surplus apart from the others. Example: rows with 3, 4 and 90 new tokens would need
270 columns together. Fed apart, the long row first takes 86 columns alone, and then all rows take 4 each.
"""

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from agentloop.engines.generator import GenerationRequest

_GROWTH = 64
_TOKENS_PER_CALL = 128
"""A further call of the model costs about as much as feeding it this many tokens."""


class EpisodeCache:
    """The tokens that a model has seen of a batch of episodes. `admit` or `narrow_to` begins a turn."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # Windowed or recurrent layers count columns, holes too. Their models compute the whole prompt at each turn.
        self._packs = full_attention(model)
        self._makes_mask = self._packs and model.config._attn_implementation == "sdpa"
        self.forget()

    def forget(self) -> None:
        self._row_by_episode: dict[int, int] = {}
        self._reset(0)

    def num_fed(self, episode: int) -> int:
        """Count the tokens of this episode that the model has already seen."""
        return len(self._fed[self._row_by_episode[episode]])

    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        """Forget everything. These episodes begin empty, or with the common beginning of all their prompts."""
        shared = list(requests[0].prompt_ids)
        for request in requests:
            shared = common_beginning(shared, request.prompt_ids)
        if self._packs and len(shared) * (len(requests) - 1) > _TOKENS_PER_CALL:
            self._reset(1)
            self.feed([shared])
            self._select([0] * len(requests), [shared] * len(requests))
        else:
            self._reset(len(requests))
        self._row_by_episode = {request.episode: row for row, request in enumerate(requests)}

    def narrow_to(self, requests: Sequence[GenerationRequest]) -> bool:
        """Drop the episodes that are not in `requests`, and cut each other row to the part that its new prompt repeats.

        False if an episode is new to the cache.
        """
        rows = [self._row_by_episode.get(request.episode) for request in requests]
        known = [row for row in rows if row is not None]
        if not self._packs or len(known) < len(rows):
            return False
        fed = [
            common_beginning(self._fed[row], request.prompt_ids) for request, row in zip(requests, known, strict=True)
        ]
        self._select(known, fed)
        self._row_by_episode = {request.episode: row for row, request in enumerate(requests)}
        return True

    def feed(self, chunks: Sequence[list[int]]) -> Tensor:
        """Feed each row its new tokens; return the logits after them, [B, V]. An empty chunk's logits mean nothing."""
        even = _even_width([len(chunk) for chunk in chunks])
        long = [row for row, chunk in enumerate(chunks) if len(chunk) > even]
        if long and self._feed_apart(long, [chunks[row][:-even] for row in long]):
            chunks = [chunk[-even:] for chunk in chunks]
        return self._feed(chunks)

    def _reset(self, rows: int) -> None:
        """Begin again with this number of empty rows."""
        if self._packs:
            self._states: Any = Cache(layer_class_to_replicate=_PackedLayer)
        else:
            self._states = DynamicCache(config=self._model.config)
        self._fed: list[list[int]] = [[] for _ in range(rows)]
        self._real = torch.zeros((rows, 0), dtype=torch.bool, device=self._model.device)
        self._length = torch.zeros((rows,), dtype=torch.long, device=self._model.device)

    def _select(self, rows: Sequence[int], fed: Sequence[Sequence[int]]) -> None:
        """Select these rows, in this order, each cut to the tokens `fed`. Their real columns move to the left."""
        index = torch.tensor(rows, device=self._model.device)
        self._fed = [list(ids) for ids in fed]
        self._length = torch.tensor([len(ids) for ids in fed], device=self._model.device)
        width = max(map(len, fed))
        columns = torch.argsort((~self._real[index]).to(torch.uint8), dim=1, stable=True)[:, :width]
        for layer in self._states.layers:
            layer.pack(index, columns)
        self._real = torch.arange(width, device=index.device)[None] < self._length[:, None]

    def part(self, rows: Sequence[int]) -> Self | None:
        """Copy these rows into a cache of their own, for `rejoin` later; None if the model's layers can't do this."""
        if not self._packs:
            return None
        index = torch.tensor(rows, device=self._model.device)
        part = type(self)(self._model)
        part._states = Cache(layers=[layer.part(index) for layer in self._states.layers])
        part._fed = [self._fed[row] for row in rows]
        part._real, part._length = self._real[index], self._length[index]
        return part

    def rejoin(self, rows: Sequence[int], part: Self) -> None:
        """Take these rows back from `part`. Nothing was fed to the other rows meanwhile."""
        index = torch.tensor(rows, device=self._model.device)
        for layer, other in zip(self._states.layers, part._states.layers, strict=True):
            layer.rejoin(index, other)
        self._real = pad(self._real, (0, part._real.shape[1] - self._real.shape[1]))
        self._real[index] = part._real
        self._length[index] = part._length

    def _feed_apart(self, rows: Sequence[int], chunks: Sequence[list[int]]) -> bool:
        """Feed some rows, and nothing to the other rows. False: the model's layers can't do this."""
        part = self.part(rows) if self._states.layers else None
        if part is None:
            return False
        part.feed(chunks)
        self.rejoin(rows, part)
        return True

    def _feed(self, chunks: Sequence[list[int]]) -> Tensor:
        """Feed all rows together, padded to the longest chunk."""
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
        """Make the mask: [B, 1, width, all columns] for full attention, else the real columns."""
        if not self._makes_mask:
            return self._real
        columns = torch.arange(before + width, device=self._real.device)
        queries = columns[before:]
        causal = columns[None, :] <= queries[:, None]
        # A hole may see itself: a query that sees nothing would give NaN.
        itself = columns[None, :] == queries[:, None]
        return ((causal[None] & self._real[:, None, :]) | itself[None])[:, None]


class _PackedLayer(DynamicLayer):
    """A layer's keys and values, which grow by blocks instead of being copied at every token."""

    keys: Tensor
    values: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._blocks = [key_states[..., :0, :], value_states[..., :0, :]]
        used = self.get_seq_length()
        end = used + key_states.shape[-2]
        self._grow(used, end)
        for block, states in zip(self._blocks, (key_states, value_states), strict=True):
            block[..., used:end, :] = states
        self.keys, self.values = (block[..., :end, :] for block in self._blocks)
        return self.keys, self.values

    def _grow(self, used: int, end: int) -> None:
        for i, block in enumerate(self._blocks):
            if block.shape[-2] < end:
                # Not empty: a hole's garbage could be NaN, and 0 x NaN is NaN.
                self._blocks[i] = block.new_zeros((*block.shape[:-2], end + _GROWTH, block.shape[-1]))
                self._blocks[i][..., :used, :] = block[..., :used, :]

    def part(self, rows: Tensor) -> Self:
        part = copy.copy(self)
        part._blocks = [self.keys[rows], self.values[rows]]
        part.keys, part.values = part._blocks
        return part

    def rejoin(self, rows: Tensor, part: Self) -> None:
        """Append the new columns of `part` to its rows; the other rows get zeros in them."""
        used, end = self.get_seq_length(), part.get_seq_length()
        self._grow(used, end)
        for block, states in zip(self._blocks, (part.keys, part.values), strict=True):
            block[..., used:end, :] = 0
            block[rows, :, used:end] = states[..., used:, :]
        self.keys, self.values = (block[..., :end, :] for block in self._blocks)

    def pack(self, rows: Tensor, columns: Tensor) -> None:
        """Select these rows, and in each row its `columns` [rows, width]."""
        self._blocks = [
            states[rows[:, None], :, columns].transpose(1, 2).contiguous() for states in (self.keys, self.values)
        ]
        self.keys, self.values = self._blocks


def _even_width(sizes: Sequence[int]) -> int:
    """Choose how many tokens all rows are fed together. Longer rows are fed their surplus first, padded alike."""
    longest, rows = max(sizes), len(sizes)
    costs = {
        width: rows * width + sum(size > width for size in sizes) * (longest - width) + _TOKENS_PER_CALL
        for width in set(sizes)
        if 0 < width < longest
    }
    best = min(costs, key=costs.__getitem__, default=longest)
    return best if best < longest and costs[best] < rows * longest else longest


def common_beginning(fed: list[int], prompt: Sequence[int]) -> list[int]:
    """Return the common beginning without the prompt's last token, which is fed to get its logits."""
    limit = min(len(fed), len(prompt) - 1)
    if list(prompt[:limit]) == fed[:limit]:
        return fed[:limit]
    return fed[: next(i for i in range(limit) if fed[i] != prompt[i])]


def full_attention(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return all(kind == "full_attention" for kind in kinds)
    return getattr(config, "sliding_window", None) is None
