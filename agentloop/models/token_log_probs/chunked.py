"""Log-probs and entropies of tokens from hidden states and the head's weight, without their [N, V] logits.

The logits of 8,192 tokens over a vocabulary of 150,000 take 4.9 GB in float32. Here they are computed in chunks of
tokens and vocabulary, and each chunk is dropped. Forward keeps running sums of each row (online softmax, Milakov &
Gimelshein 2018), and backward computes each chunk again. That takes four matrix products instead of three.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CPU_CHUNKS = (512, 2048)
"""Tokens and vocabulary of a chunk: 4 MiB of float32 stay in a CPU's cache between passes over them."""
GPU_CHUNKS = (8192, 16384)
"""512 MiB, and as much room again. On an H100 only larger chunks were quicker, by 2 % at most, of 13 sizes tried."""


@dataclass(frozen=True, eq=False)
class RowSums:
    """Running sums of each row over the chunks so far, all [N]. x are the row's logits over the temperature."""

    top: Tensor
    """max x"""
    total: Tensor
    """sum exp(x - top)"""
    moment: Tensor
    """sum exp(x - top) (x - top); 0 where no entropies are computed."""
    target: Tensor
    """x of the target; 0 before the chunk that has it."""
    factor: Tensor | None
    """Factor from the logits of a chunk to x; None: the logits are x."""

    @classmethod
    def before_any_chunk(cls, like: Tensor, *, factor: Tensor | None) -> RowSums:
        """The sums before the first chunk, for the rows [N] and in the type of `like`."""
        total, moment, target = torch.zeros((3, len(like)), dtype=like.dtype, device=like.device)
        # The lowest number instead of -inf, so that differences stay numbers.
        return cls(torch.full_like(total, torch.finfo(like.dtype).min / 2), total, moment, target, factor)

    def part(self, tokens: slice) -> RowSums:
        factor = None if self.factor is None else self.factor[tokens]
        return RowSums(self.top[tokens], self.total[tokens], self.moment[tokens], self.target[tokens], factor)

    def log_probs(self) -> Tensor:
        return (self.target - self.top) - self.total.log()

    def entropies(self) -> Tensor:
        """-sum p log p = log total - moment / total."""
        return self.total.log() - self.moment / self.total


@dataclass(frozen=True, eq=False)
class Cotangents:
    """Gradients of log-probs and, where they were computed, of entropies; all [N]."""

    log_probs: Tensor
    entropies: Tensor | None

    def row_coefficients(self, sums: RowSums) -> tuple[Tensor, Tensor, Tensor]:
        """a, b, c [N] of the scaled gradient exp(x - top) (a + b (x - top)) - c [x is the target].

        With gradients g of log-probs and e of entropies, the gradient itself is
        -(p (g + e (log p + entropy)) - g [x is the target]). The scaled one is -total times that, and without entropies
        it is also divided by g: a, b, c are then 1, 0, total. The factor per row is applied later, to [N, H] instead of
        [N, V] numbers.
        """
        if self.entropies is None:
            return torch.ones_like(sums.total), torch.zeros_like(sums.total), sums.total
        base = self.log_probs - self.entropies * (sums.moment / sums.total)
        return base, self.entropies, sums.total * self.log_probs

    def part(self, tokens: slice) -> Cotangents:
        return Cotangents(self.log_probs[tokens], None if self.entropies is None else self.entropies[tokens])


# Passes over a chunk of logits [n, v], by in-place operations on it. `columns` [n] says where the target is; from 0 to
# v - 1 in this chunk.


def absorb(logits: Tensor, sums: RowSums, columns: Tensor, *, entropy: bool, spare: Tensor) -> None:
    """Add a chunk to the rows' sums, in place. `logits` and `spare` [n, v] may be overwritten."""
    if sums.factor is not None:
        logits.mul_(sums.factor[:, None])
    inside, places = _inside(columns, logits.shape[1])
    torch.where(inside, logits.gather(1, places[:, None])[:, 0], sums.target, out=sums.target)
    top = torch.maximum(sums.top, logits.amax(dim=1))
    fall = sums.top - top
    shrink = fall.exp()
    if entropy:
        sums.moment.addcmul_(fall, sums.total).mul_(shrink)
    sums.total.mul_(shrink)
    sums.top.copy_(top)
    logits.sub_(top[:, None])
    if entropy:
        powers = torch.exp(logits, out=spare)
        sums.total.add_(powers.sum(dim=1))
        sums.moment.add_(logits.mul_(powers).sum(dim=1))
    else:
        sums.total.add_(logits.exp_().sum(dim=1))


def differentiate(
    logits: Tensor,
    sums: RowSums,
    columns: Tensor,
    *,
    cotangents: Cotangents,
    operand: torch.dtype,
    spare: Tensor,
) -> Tensor:
    """The gradient of the chunk, [n, v] of type `operand`, with the coefficients of `Cotangents.row_coefficients`.

    Overwrites `logits` and `spare`, and may return either.
    """
    if sums.factor is not None:
        logits.mul_(sums.factor[:, None])
    inside, places = _inside(columns, logits.shape[1])
    base, slope, at_target = cotangents.row_coefficients(sums)
    logits.sub_(sums.top[:, None])
    if cotangents.entropies is None:
        gradient = logits.exp_()
    else:
        gradient = torch.exp(logits, out=spare)
        gradient.mul_(torch.addcmul(base[:, None], logits, slope[:, None], out=logits))
    gradient.scatter_add_(1, places[:, None], torch.where(inside, -at_target, 0.0)[:, None])
    return gradient.to(operand)


def _inside(columns: Tensor, width: int) -> tuple[Tensor, Tensor]:
    return (columns >= 0) & (columns < width), columns.clamp(0, width - 1)


def head_log_probs(
    hidden: Tensor,
    weight: Tensor,
    *,
    targets: Tensor,
    temperature: Tensor,
    entropy: bool = True,
    sizes: ChunkSizes | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` [N] and entropies under softmax(hidden weight^T / temperature), [N] nats.

    `hidden` is [N, H], `weight` [V, H], `temperature` [N]. Without `entropy` the second result is None. Sums are
    float32, or float64 if `hidden` or `weight` is. On CUDA, bfloat16 weights, and any weights under its autocast, are
    multiplied in bfloat16 with float32 results. Elsewhere operands are made precise chunk by chunk, whatever autocast
    says. Hidden states and weight have first derivatives; `temperature` has none.
    """
    sizes = sizes or ChunkSizes.for_device(hidden.device)
    apply: Any = _HeadLogProbs.apply
    found: tuple[Tensor, Tensor | None] = apply(hidden, weight, targets, temperature, entropy, sizes)
    return found


@dataclass(frozen=True)
class ChunkSizes:
    """Tokens and vocabulary of a chunk. They change speed, memory and rounding only."""

    tokens: int
    vocabulary: int

    @classmethod
    def for_device(cls, device: torch.device) -> ChunkSizes:
        return cls(*(CPU_CHUNKS if device.type == "cpu" else GPU_CHUNKS))


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        entropy: bool,
        sizes: ChunkSizes,
    ) -> tuple[Tensor, Tensor | None]:
        operand = _operand_type(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            chunks = _Chunks(hidden, weight, targets, temperature, operand=operand, sizes=sizes)
            sums = chunks.no_sums()
            chunks.absorb(sums, entropy=entropy)
            log_probs, entropies = sums.log_probs(), sums.entropies() if entropy else None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, temperature, sums.top, sums.total, sums.moment)
        ctx.operand, ctx.sizes = operand, sizes
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, log_probs: Tensor | None, entropies: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        if log_probs is None and entropies is None:
            return (None,) * 6
        hidden, weight, targets, temperature, top, total, moment = ctx.saved_tensors
        cotangents = Cotangents(torch.zeros_like(total) if log_probs is None else log_probs, entropies)
        with torch.autocast(hidden.device.type, enabled=False):
            chunks = _Chunks(hidden, weight, targets, temperature, operand=ctx.operand, sizes=ctx.sizes)
            # The sum `target` is not needed any more.
            sums = replace(chunks.no_sums(), top=top, total=total, moment=moment)
            gradients = chunks.gradients(sums, cotangents, wanted=ctx.needs_input_grad[:2])
        return (*gradients, None, None, None, None)


def _operand_type(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The type that is multiplied in; never float16, in which small gradients would be 0."""
    if torch.float64 in (hidden.dtype, weight.dtype):
        return torch.float64
    device = hidden.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    wide_results = device == "cuda" and torch.version.hip is None
    return torch.bfloat16 if wide_results and autocast == torch.bfloat16 else torch.float32


class _Chunks:
    """The passes over all chunks. The outer loop is over the vocabulary: each part of the weight is cast once."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        *,
        operand: torch.dtype,
        sizes: ChunkSizes,
    ) -> None:
        self.precise = torch.float64 if operand == torch.float64 else torch.float32
        self._hidden, self._weight, self._targets = hidden, weight, targets
        self._operand, self._sizes = operand, sizes
        self._factor = temperature.to(self.precise).reciprocal()
        # States are divided by the temperature where that loses nothing: [N, H] numbers instead of [N, V].
        self._divided = operand == self.precise
        states = hidden.to(operand)
        self._states = states * self._factor[:, None] if self._divided else states
        size = min(sizes.tokens, len(targets)) * min(sizes.vocabulary, len(weight))
        self._buffers = torch.empty((2, size), dtype=self.precise, device=hidden.device)

    def no_sums(self) -> RowSums:
        return RowSums.before_any_chunk(self._factor, factor=None if self._divided else self._factor)

    def absorb(self, sums: RowSums, *, entropy: bool) -> None:
        for vocabulary in _slices(len(self._weight), self._sizes.vocabulary):
            weight = self._weight[vocabulary].to(self._operand)
            for tokens in _slices(len(self._targets), self._sizes.tokens):
                logits, spare = self._logits(tokens, weight)
                columns = self._targets[tokens] - vocabulary.start
                absorb(logits, sums.part(tokens), columns, entropy=entropy, spare=spare)

    def gradients(
        self, sums: RowSums, cotangents: Cotangents, *, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of hidden states and weight, where wanted."""
        # `rest` is the factor that `differentiate` leaves out, `per_row` the same with the temperature.
        rest = -sums.total.reciprocal()
        if cotangents.entropies is None:
            rest = rest * cotangents.log_probs
        per_row = rest * self._factor
        of_hidden = torch.zeros_like(self._states, dtype=self.precise) if wanted[0] else None
        of_weight = torch.zeros_like(self._weight) if wanted[1] else None
        states = (self._states * (rest if self._divided else per_row)[:, None]).to(self._operand) if wanted[1] else None
        for vocabulary in _slices(len(self._weight), self._sizes.vocabulary):
            weight = self._weight[vocabulary].to(self._operand)
            # The gradient is summed in place where its type allows, else it is cast once.
            summed = None if of_weight is None else of_weight[vocabulary].to(self.precise)
            for tokens in _slices(len(self._targets), self._sizes.tokens):
                logits, spare = self._logits(tokens, weight)
                gradient = differentiate(
                    logits,
                    sums.part(tokens),
                    self._targets[tokens] - vocabulary.start,
                    cotangents=cotangents.part(tokens),
                    operand=self._operand,
                    spare=spare,
                )
                if of_hidden is not None:
                    _add_product(of_hidden[tokens], gradient, weight)
                if summed is not None and states is not None:
                    _add_product(summed, gradient.t(), states[tokens])
            if of_weight is not None and summed is not None and of_weight.dtype != self.precise:
                of_weight[vocabulary] = summed
        return None if of_hidden is None else of_hidden.mul_(per_row[:, None]).to(self._hidden.dtype), of_weight

    def _logits(self, tokens: slice, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The logits [n, v] of a chunk, and as much room again. They are divided by the temperature if states are."""
        states = self._states[tokens]
        shape = len(states), len(weight)
        logits, spare = (buffer[: shape[0] * shape[1]].view(shape) for buffer in self._buffers)
        if self._divided:
            torch.mm(states, weight.t(), out=logits)
        else:
            torch.mm(states, weight.t(), out_dtype=self.precise, out=logits)
        return logits, spare


def _add_product(sum: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == sum.dtype:
        sum.addmm_(left, right)
    else:
        torch.addmm(sum, left, right, out_dtype=sum.dtype, out=sum)


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]
