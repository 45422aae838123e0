"""Keys and values of running episodes in memory that stays where it is, for GPUs.

A decode step of a model of a billion parameters takes a GPU less time than Python takes to ask for its kernels. Here
the step of so many rows and columns is recorded once, as a CUDA graph, and replayed with new numbers. Each row's tokens
stand at the left in order; no query sees what stands behind a row's length, and its next tokens are written over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from agentloop.generation.cache import common_beginning
from agentloop.generation.generator import GenerationRequest

_COLUMNS = 256
"""Tokens: a step is recorded for multiples of so many columns."""
_MOST_IN_A_PASS = 32_768
"""Tokens of prompts, padding among them: bounds what their activations take."""


class FixedCache:
    """What a model has seen of a batch of episodes; has the methods of `EpisodeCache`.

    For models with full attention by torch's `scaled_dot_product_attention`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._buffers = _Buffers()
        self._steps: dict[tuple[int, int], _Step] = {}
        self._fed: list[list[int]] = []
        self._row_of: dict[int, int] = {}
        self._places: list[int] = []
        """Where in the buffers each row is."""

    def forget(self) -> None:
        """Nothing has been seen; memory and recorded steps stay."""
        self._fed, self._row_of, self._places = [], {}, []

    def fed(self, episode: int) -> int:
        """Tokens of this episode the model has already seen."""
        return len(self._fed[self._row_of[episode]])

    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        """Forget everything; these episodes begin from what all their prompts begin with, which is computed once."""
        shared = list(requests[0].prompt_ids)
        for request in requests:
            shared = common_beginning(shared, request.prompt_ids)
        self._fed, self._places = [[] for _ in requests], [*range(len(requests))]
        self._row_of = {request.episode: row for row, request in enumerate(requests)}
        if shared:
            self.feed([shared, *[[]] * (len(requests) - 1)])
            self._buffers.take([0] * len(requests), len(shared))
            self._fed = [list(shared) for _ in requests]

    def keep(self, requests: Sequence[GenerationRequest]) -> bool:
        """Narrow to the requested episodes; False if any is new.

        Of an episode whose prompt was rewritten, what the old and the new prompt begin with is kept.
        """
        rows = [self._row_of.get(request.episode) for request in requests]
        known = [row for row in rows if row is not None]
        if len(known) < len(rows):
            return False
        self._fed = [
            common_beginning(self._fed[row], request.prompt_ids) for request, row in zip(requests, known, strict=True)
        ]
        self._move([self._places[row] for row in known])
        self._row_of = {request.episode: row for row, request in enumerate(requests)}
        return True

    def part(self, rows: Sequence[int]) -> None:
        """There are no parts: a row that is fed nothing costs next to nothing here."""

    def feed(self, chunks: Sequence[list[int]]) -> Tensor:
        """Show each row its new tokens; the logits after the last one, [B, V]. A row with an empty chunk has zeros."""
        running = [row for row, chunk in enumerate(chunks) if chunk]
        width = max(len(chunks[row]) for row in running)
        if self._buffers.grow(_power(len(chunks)), _whole(max(map(len, self._fed)) + width + 1)):
            self._steps.clear()
        if width == 1:
            logits = self._decode(running, [chunks[row][0] for row in running])
        else:
            at_once = max(1, _MOST_IN_A_PASS // width)
            parts = [running[first : first + at_once] for first in range(0, len(running), at_once)]
            logits = torch.cat([self._prefill(part, [chunks[row] for row in part]) for part in parts])
        for row in running:
            self._fed[row] += chunks[row]
        found = logits.new_zeros((len(chunks), logits.shape[1]))
        found[torch.tensor(running, device=found.device)] = logits
        return found

    def _prefill(self, rows: Sequence[int], chunks: Sequence[list[int]]) -> Tensor:
        """Logits [rows, V]. Chunks are padded on the left; the padding is written behind the chunk."""
        width, device = max(map(len, chunks)), self._model.device
        ids = torch.tensor([[0] * (width - len(chunk)) + chunk for chunk in chunks], device=device)
        sizes = torch.tensor([len(chunk) for chunk in chunks], device=device)
        lengths = torch.tensor([len(self._fed[row]) for row in rows], device=device)
        number = torch.arange(width, device=device)[None] - (width - sizes[:, None])
        columns = lengths[:, None] + torch.where(number >= 0, number, sizes[:, None] - 1 - number)
        places = torch.tensor([self._places[row] for row in rows], device=device)
        return self._forward(ids, _At(self._buffers, places, columns, _whole(int(columns.max()) + 1)))

    def _decode(self, rows: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Logits [rows, V] after one more token of each. Other rows among the first of the buffers have garbage."""
        count = _power(len(rows))
        if max(self._places[row] for row in rows) >= count:
            chosen = set(rows)
            order = [*rows, *(row for row in range(len(self._fed)) if row not in chosen)]
            self._move([self._places[row] for row in order], order)
        ids, lengths = [0] * count, [0] * count
        for row, place in enumerate(self._places):
            if place < count:
                lengths[place] = len(self._fed[row])
        places = [self._places[row] for row in rows]
        for place, token in zip(places, tokens, strict=True):
            ids[place] = token
        columns = _whole(max(lengths) + 1)
        step = self._steps.get((count, columns))
        if step is None:
            step = self._steps[count, columns] = _Step(self, count, columns)
        return step.run(ids, lengths)[torch.tensor(places, device=self._model.device)]

    def _move(self, places: Sequence[int], order: Sequence[int] | None = None) -> None:
        """What is at these places comes to the first ones; it is that of the rows in their order, or in `order`."""
        self._buffers.take(places, max(map(len, self._fed), default=0))
        self._places = [*range(len(places))]
        for place, row in enumerate(order or ()):
            self._places[row] = place

    def _forward(self, ids: Tensor, at: _At) -> Tensor:
        seen = torch.arange(at.width, device=ids.device)[None, None] <= at.columns[:, :, None]
        output: Any = self._model(
            input_ids=ids,
            attention_mask=seen[:, None],
            position_ids=at.columns,
            past_key_values=Cache(layers=[_Layer(at, number) for number in range(_layers(self._model))]),
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits
        return logits[:, -1]


class _Step:
    """One more token for the first `count` rows: a recorded graph on a GPU, elsewhere a call of the model."""

    def __init__(self, cache: FixedCache, count: int, columns: int) -> None:
        device = cache._model.device
        self._ids = torch.zeros((count, 1), dtype=torch.long, device=device)
        self._columns = torch.zeros((count, 1), dtype=torch.long, device=device)
        self._at = _At(cache._buffers, None, self._columns, columns)
        self._cache = cache
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None

    def run(self, ids: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Logits [count, V], which the next call writes over."""
        self._ids.copy_(torch.tensor(ids)[:, None])
        self._columns.copy_(torch.tensor(lengths)[:, None])
        if self._ids.device.type != "cuda":
            return self._cache._forward(self._ids, self._at)
        if self._graph is None:
            self._record()
        assert self._graph is not None and self._logits is not None
        self._graph.replay()
        return self._logits

    def _record(self) -> None:
        # Libraries make their workspaces in the first calls, which a graph may not hold.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._cache._forward(self._ids, self._at)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = self._cache._forward(self._ids, self._at)


@dataclass
class _Buffers:
    """Keys and values of all layers, [rows, heads, columns, width] each; made as soon as their shape is known."""

    rows: int = 0
    columns: int = 0
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def grow(self, rows: int, columns: int) -> bool:
        """Room for so many; whether they are elsewhere now."""
        if rows <= self.rows and columns <= self.columns:
            return False
        old_rows, old_columns = self.rows, self.columns
        self.rows, self.columns = max(rows, old_rows), max(columns, old_columns)
        for number, buffers in self.layers.items():
            grown = tuple(self._zeros(buffer) for buffer in buffers)
            for new, old in zip(grown, buffers, strict=True):
                new[:old_rows, :, :old_columns] = old
            self.layers[number] = grown[0], grown[1]
        return True

    def of_layer(self, number: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if number not in self.layers:
            self.layers[number] = self._zeros(keys), self._zeros(values)
        return self.layers[number]

    def take(self, places: Sequence[int], columns: int) -> None:
        """The first rows become what is at `places` now."""
        if list(places) == [*range(len(places))]:
            return
        for buffers in self.layers.values():
            for buffer in buffers:
                index = torch.tensor(places, device=buffer.device)
                buffer[: len(places), :, :columns] = buffer[index, :, :columns]

    def _zeros(self, states: Tensor) -> Tensor:
        # Not empty: garbage that no query sees could be NaN, and 0 x NaN is NaN.
        return states.new_zeros((self.rows, states.shape[1], self.columns, states.shape[3]))


@dataclass(frozen=True)
class _At:
    """Which rows of the buffers a pass shows tokens to, and where they are written."""

    buffers: _Buffers
    places: Tensor | None
    """[B]; None: the first rows."""
    columns: Tensor
    """[B, tokens]: their positions."""
    width: int
    """Columns that queries can see."""


class _Layer(CacheLayerMixin):
    """One layer's part of a pass, as transformers asks for it."""

    def __init__(self, at: _At, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._at, self._number = at, number

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        at, count = self._at, len(key_states)
        rows = torch.arange(count, device=key_states.device) if at.places is None else at.places
        found = []
        for buffer, states in zip(
            at.buffers.of_layer(self._number, key_states, value_states), (key_states, value_states), strict=True
        ):
            buffer[rows[:, None], :, at.columns] = states.transpose(1, 2).to(buffer.dtype)
            found.append(buffer[:count, :, : at.width] if at.places is None else buffer[rows, :, : at.width])
        return found[0], found[1]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to be made: the buffers are all layers'."""

    def get_seq_length(self) -> int:
        return self._at.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._at.width, 0

    def get_max_length(self) -> int:
        return self._at.width


def _layers(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().num_hidden_layers)


def _power(count: int) -> int:
    """The least power of two that is not below."""
    return 1 << (count - 1).bit_length()


def _whole(columns: int) -> int:
    return -(-columns // _COLUMNS) * _COLUMNS
