"""Keys and values of running episodes in memory that stays where it is, for GPUs.

A decode step of a model of a billion parameters takes a GPU less time than Python takes to ask for its kernels. Here
the step of so many rows and columns is recorded once, as a CUDA graph, and replayed with new numbers. Each row's tokens
stand at the left in order; no query sees what stands behind a row's length, and its next tokens are written over it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from agentloop.engines.local.cache import KeyValueCache, full_attention

_COLUMNS = 256
"""Tokens: the fewest columns that a step is recorded for."""
_ROWS = 8
"""The fewest rows that a step is recorded for."""
_MOST_IN_A_PASS = 32_768
"""Tokens of prompts, padding among them: bounds what their activations take."""


class FixedCache(KeyValueCache):
    """For models that it `suits`. Buffers only grow; n rows have the first n places of them, in any order."""

    tokens_per_call = 8192

    def __init__(self, model: PreTrainedModel) -> None:
        self._buffers = _Buffers()
        self._steps: dict[tuple[int, int], _Step] = {}
        self._places: list[int] = []
        self._weights: list[int] = []
        self._stream = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        super().__init__(model)

    @staticmethod
    def suits(model: PreTrainedModel) -> bool:
        """Whether its attention can be masked as here, and no step looks at a number before it asks for a kernel."""
        ropes = str([getattr(module, "rope_type", "") for module in model.modules()])
        experts = any(name.endswith("experts") for name, _ in model.named_modules())
        masked = full_attention(model) and model.config._attn_implementation == "sdpa"
        counted = "dynamic" in ropes or "longrope" in ropes
        return bool(masked and model._can_compile_fullgraph and not experts and not counted)

    def bytes_of(self, rows: int, tokens: int) -> int:
        """What so many rows take, once one of them is so long; 0 before the first token was shown."""
        both = [buffer for layer in self._buffers.layers.values() for buffer in layer]
        each = sum(buffer.shape[1] * buffer.shape[3] * buffer.element_size() for buffer in both)
        return _rows(rows) * _columns(tokens) * each

    def forget(self) -> None:
        """Memory and recorded steps stay, unless weights are elsewhere now: a step reads them where they were."""
        super().forget()
        weights = [parameter.data_ptr() for parameter in self._model.parameters()]
        if weights != self._weights:
            self._steps.clear()
        self._weights = weights

    def part(self, rows: Sequence[int]) -> Self:
        """They come to the first places, for fewer rows in a step."""
        self._bring_first(rows)
        part = copy.copy(self)
        part._fed = [self._fed[row] for row in rows]
        part._places = [self._places[row] for row in rows]
        return part

    def rejoin(self, rows: Sequence[int], part: Self) -> None:
        for row, place in zip(rows, part._places, strict=True):
            self._places[row] = place

    def _reset(self, rows: int) -> None:
        self._fed = [[] for _ in range(rows)]
        self._places = [*range(rows)]

    def _take(self, rows: Sequence[int], fed: Sequence[Sequence[int]]) -> None:
        if len(set(rows)) < len(rows):  # of what all begin with
            self._grow(len(rows), 0)
            self._buffers.copy([self._places[row] for row in rows], [*range(len(rows))], max(map(len, fed)))
            self._places = [*range(len(rows))]
        else:
            self._bring_first(rows)
            self._places = [self._places[row] for row in rows]
        self._fed = [list(ids) for ids in fed]

    def _bring_first(self, rows: Sequence[int]) -> None:
        """These rows have the first places; those that had them have theirs."""
        places = [self._places[row] for row in rows]
        outside = [place for place in places if place >= len(rows)]
        free = sorted({*range(len(rows))} - {*places})
        swapped = dict(zip(outside + free, free + outside, strict=True))
        if swapped:
            self._buffers.copy([*swapped], [*swapped.values()], max(map(len, self._fed)))
            self._places = [swapped.get(place, place) for place in self._places]

    def _grow(self, rows: int, tokens: int) -> None:
        wanted = _rows(rows), _columns(tokens)
        if wanted[0] > self._buffers.rows or wanted[1] > self._buffers.columns:
            self._steps.clear()  # they read and write the buffers where these were
            self._buffers.grow(*wanted)

    def _feed(self, chunks: Sequence[list[int]]) -> Tensor:
        return self._shown([*range(len(chunks))], chunks)

    def _feed_apart(self, rows: Sequence[int], chunks: Sequence[list[int]]) -> bool:
        self._shown(rows, chunks)
        return True

    def _shown(self, rows: Sequence[int], chunks: Sequence[list[int]]) -> Tensor:
        """Logits [rows, V]."""
        width = max(map(len, chunks))
        longest = max(len(self._fed[row]) + len(chunk) for row, chunk in zip(rows, chunks, strict=True))
        self._grow(len(self._fed), longest)
        if width == 1:
            logits = self._decode(rows, chunks)
        else:
            most = max(1, _MOST_IN_A_PASS // width)
            logits = torch.cat(
                [self._prefill(rows[at : at + most], chunks[at : at + most], width) for at in range(0, len(rows), most)]
            )
        for row, chunk in zip(rows, chunks, strict=True):
            self._fed[row] += chunk
        return logits

    def _prefill(self, rows: Sequence[int], chunks: Sequence[list[int]], width: int) -> Tensor:
        """Chunks are padded on the left."""
        padding = self._buffers.columns - 1
        ids, columns = [], []
        for row, chunk in zip(rows, chunks, strict=True):
            before, missing = len(self._fed[row]), width - len(chunk)
            ids.append([0] * missing + chunk)
            columns.append([padding] * missing + [*range(before, before + len(chunk))])
        seen = _whole(max(len(self._fed[row]) + len(chunk) for row, chunk in zip(rows, chunks, strict=True)))
        device = self._model.device
        places = torch.tensor([self._places[row] for row in rows], device=device)
        at = _At(self._buffers, places, torch.tensor(columns, device=device), seen, first=False)
        return _forward(self._model, torch.tensor(ids, device=device), at)

    def _decode(self, rows: Sequence[int], chunks: Sequence[list[int]]) -> Tensor:
        """One more token for each of these rows, unless its chunk is empty."""
        given = [[0, self._buffers.columns - 1]] * _rows(len(self._fed))
        seen = 0
        for row, chunk in zip(rows, chunks, strict=True):
            if chunk:
                given[self._places[row]] = [chunk[0], len(self._fed[row])]
                seen = max(seen, len(self._fed[row]) + 1)
        shape = len(given), _whole(seen)
        step = self._steps.get(shape)
        if step is None:
            step = _Step(self._model, self._buffers, shape)
        logits = step.run(given, self._stream, [*self._steps.values()])
        self._steps[shape] = step
        return logits[torch.tensor([self._places[row] for row in rows], device=logits.device)]


class _Step:
    """One more token for the first rows: a recorded graph on a GPU, elsewhere a call of the model."""

    def __init__(self, model: PreTrainedModel, buffers: _Buffers, shape: tuple[int, int]) -> None:
        """`shape`: so many rows, and columns that they can see."""
        self._model = model
        self._given = torch.zeros((shape[0], 2), dtype=torch.long, device=model.device)
        places = torch.arange(shape[0], device=model.device)
        self._at = _At(buffers, places, self._given[:, 1:], shape[1], first=True)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits = torch.empty(0)

    def run(self, given: Sequence[Sequence[int]], stream: torch.cuda.Stream | None, others: Sequence[_Step]) -> Tensor:
        """Logits of each row of `given`, its token and its column; the next run of any step writes over them."""
        self._given.copy_(torch.tensor(given))
        if stream is None:
            return self._forward()
        if self._graph is None:
            self._graph = self._recorded(stream, others)
        self._graph.replay()
        return self._logits

    def _recorded(self, stream: torch.cuda.Stream, others: Sequence[_Step]) -> torch.cuda.CUDAGraph:
        """Called with numbers in place, for it writes keys and values where they say."""
        # Libraries load kernels and make workspaces in the first call, which a graph may not hold.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # All steps have their activations in the memory of the first one: no two run at once.
        pool = next((step._graph.pool() for step in others if step._graph is not None), None)
        # Tools may be at work in other threads.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._logits = self._forward()
        return graph

    def _forward(self) -> Tensor:
        return _forward(self._model, self._given[:, :1], self._at)


@dataclass
class _Buffers:
    """Keys and values of all layers, [rows, heads, columns, width] each; made as soon as their shape is known."""

    rows: int = 0
    columns: int = 0
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def grow(self, rows: int, columns: int) -> None:
        self.rows, self.columns = max(rows, self.rows), max(columns, self.columns)
        for number, (keys, values) in self.layers.items():  # one after another: old and new are there at once
            self.layers[number] = self._moved(keys), self._moved(values)

    def of_layer(self, number: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if number not in self.layers:
            device = keys.device.type  # autocast would cast all of them for each attention
            kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else keys.dtype
            self.layers[number] = self._zeros(keys.to(kind)), self._zeros(values.to(kind))
        return self.layers[number]

    def copy(self, sources: Sequence[int], targets: Sequence[int], columns: int) -> None:
        """What stood at `sources` stands at `targets`."""
        for buffer in (buffer for layer in self.layers.values() for buffer in layer):
            index = torch.tensor([sources, targets], device=buffer.device)
            buffer[index[1], :, :columns] = buffer[index[0], :, :columns]

    def _moved(self, old: Tensor) -> Tensor:
        new = self._zeros(old)
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def _zeros(self, states: Tensor) -> Tensor:
        # Not empty: garbage that no query sees could be NaN, and 0 x NaN is NaN.
        return states.new_zeros((self.rows, states.shape[1], self.columns, states.shape[3]))


@dataclass(frozen=True)
class _At:
    """Which rows of the buffers a pass shows tokens to, and where they are written."""

    buffers: _Buffers
    places: Tensor
    """[B]."""
    columns: Tensor
    """[B, tokens]: their positions."""
    seen: int
    """Columns that queries can see."""
    first: bool
    """The places are the first ones in order: they can be seen without a copy."""


class _Layer(DynamicLayer):
    """One layer's part of a pass, as transformers asks for it."""

    def __init__(self, at: _At, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._at, self._number = at, number

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = self._at.buffers.of_layer(self._number, key_states, value_states)
        return self._written(keys, key_states), self._written(values, value_states)

    def _written(self, buffer: Tensor, states: Tensor) -> Tensor:
        at = self._at
        buffer[at.places[:, None], :, at.columns] = states.transpose(1, 2).to(buffer.dtype)
        seen = buffer[:, :, : at.seen]
        return seen[: len(states)] if at.first else seen[at.places]

    def get_seq_length(self) -> int:
        return self._at.seen


def _forward(model: PreTrainedModel, ids: Tensor, at: _At) -> Tensor:
    seen = torch.arange(at.seen, device=ids.device)[None, None] <= at.columns[:, :, None]
    layers: list[Any] = [_Layer(at, number) for number in range(model.config.get_text_config().num_hidden_layers)]
    output: Any = model(
        input_ids=ids,
        attention_mask=seen[:, None],
        position_ids=at.columns % (at.buffers.columns - 1),  # 0 for padding: some models look positions up
        past_key_values=Cache(layers=layers),
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = output.logits
    return logits[:, -1]


def _power(count: int) -> int:
    """The least power of two that is not below."""
    return 1 << (count - 1).bit_length()


def _rows(count: int) -> int:
    """Of a step, whatever was sampled before: other numbers of rows are rounded otherwise."""
    return max(_ROWS, _power(count))


def _whole(tokens: int) -> int:
    """Rounded up to a quarter of the next power of two: steps are recorded for few numbers of columns."""
    unit = max(_COLUMNS, _power(tokens) // 4)
    return -(-tokens // unit) * unit


def _columns(tokens: int) -> int:
    """Of the buffers. The last one is no token's: padding is written there."""
    return _whole(tokens) + 1
