"""Log-probs and entropies of tokens from hidden states and the head's weight, never building their [N, V] logits.

Logits are made chunk by chunk of tokens and vocabulary and forgotten: forward keeps running sums of each row (online
softmax, Milakov & Gimelshein 2018), and backward makes each chunk again. That is four matrix products where the plain
path has three, and none of its [N, V] arrays.
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
"""512 MiB, and as much room again. Of thirteen sizes tried on an H100 only larger ones were quicker, by 2 % at most."""


@dataclass(frozen=True, eq=False)
class RowSums:
    """What is known of each row after some of the vocabulary, x being its logits over the temperature; all [N]."""

    top: Tensor
    """max x"""
    total: Tensor
    """sum exp(x - top)"""
    moment: Tensor
    """sum exp(x - top) (x - top); left at 0 where no entropy is asked for."""
    target: Tensor
    """x of the target; 0 until its chunk has come."""
    factor: Tensor | None
    """x over the logits of a chunk; None: they are x."""

    @classmethod
    def of_nothing(cls, like: Tensor, *, factor: Tensor | None) -> RowSums:
        """For rows of [N], in the type of `like`."""
        total, moment, target = torch.zeros((3, len(like)), dtype=like.dtype, device=like.device)
        # Lowest, not -inf: differences of it stay numbers.
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
    """Gradients of log-probs and, where they were asked for, of entropies; all [N]."""

    log_probs: Tensor
    entropies: Tensor | None

    def of_rows(self, sums: RowSums) -> tuple[Tensor, Tensor, Tensor]:
        """a, b, c [N] of the gradient exp(x - top) (a + b (x - top)) - c [x is the target]; 1, 0, total sans entropies.

        It is -total times that of log-probs g and entropies e, p (g + e (log p + entropy)) - g [x is the target]; and
        without entropies also over g. What is left out is a factor per row, which costs less on [N, H] than on [N, V].
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
    """Add the chunk to the rows' sums, in place; `logits` and `spare` [n, v] may be overwritten."""
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
    """[n, v] of type `operand`: the gradient of the chunk as `Cotangents.of_rows` says.

    Overwrites `logits` and `spare`, and may return either.
    """
    if sums.factor is not None:
        logits.mul_(sums.factor[:, None])
    inside, places = _inside(columns, logits.shape[1])
    base, slope, at_target = cotangents.of_rows(sums)
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
    how: How | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` [N] and entropies under softmax(hidden weight^T / temperature), [N] nats.

    `hidden` is [N, H], `weight` [V, H], `temperature` [N]. Entropies that are not asked for are None. Everything is
    summed in float32, in float64 if `hidden` or `weight` is. bfloat16 is multiplied as it is with float32 results where
    the device can, and so are others under autocast; elsewhere operands are made precise chunk by chunk, whatever
    autocast says. Hidden states and weight have first derivatives; `temperature` has none.
    """
    how = how or How.on(hidden.device)
    apply: Any = _HeadLogProbs.apply
    found: tuple[Tensor, Tensor | None] = apply(hidden, weight, targets, temperature, entropy, how)
    return found


@dataclass(frozen=True)
class How:
    """What a chunk is. Changes speed, memory and rounding only."""

    tokens: int
    vocabulary: int

    @classmethod
    def on(cls, device: torch.device) -> How:
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
        how: How,
    ) -> tuple[Tensor, Tensor | None]:
        operand = _operand_type(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            chunks = _Chunks(hidden, weight, targets, temperature, operand=operand, how=how)
            sums = chunks.no_sums()
            chunks.absorb(sums, entropy=entropy)
            log_probs, entropies = sums.log_probs(), sums.entropies() if entropy else None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, temperature, sums.top, sums.total, sums.moment)
        ctx.operand, ctx.how = operand, how
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
            chunks = _Chunks(hidden, weight, targets, temperature, operand=ctx.operand, how=ctx.how)
            # Of the sums, `target` has had its use.
            sums = replace(chunks.no_sums(), top=top, total=total, moment=moment)
            gradients = chunks.gradients(sums, cotangents, wanted=ctx.needs_input_grad[:2])
        return (*gradients, None, None, None, None)


def _operand_type(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """What is multiplied. float16 is not: small gradients would be 0 in it."""
    if torch.float64 in (hidden.dtype, weight.dtype):
        return torch.float64
    device = hidden.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    wide_results = device == "cuda" and torch.version.hip is None
    return torch.bfloat16 if wide_results and autocast == torch.bfloat16 else torch.float32


class _Chunks:
    """The passes over all chunks: vocabulary outside, so that each part of the weight is read and cast once."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        *,
        operand: torch.dtype,
        how: How,
    ) -> None:
        self.precise = torch.float64 if operand == torch.float64 else torch.float32
        self._hidden, self._weight, self._targets = hidden, weight, targets
        self._operand, self._how = operand, how
        self._factor = temperature.to(self.precise).reciprocal()
        # Divided before the product where that loses nothing: [N, H] numbers instead of [N, V].
        self._divided = operand == self.precise
        states = hidden.to(operand)
        self._states = states * self._factor[:, None] if self._divided else states
        size = min(how.tokens, len(targets)) * min(how.vocabulary, len(weight))
        self._buffers = torch.empty((2, size), dtype=self.precise, device=hidden.device)

    def no_sums(self) -> RowSums:
        return RowSums.of_nothing(self._factor, factor=None if self._divided else self._factor)

    def absorb(self, sums: RowSums, *, entropy: bool) -> None:
        for vocabulary in _slices(len(self._weight), self._how.vocabulary):
            weight = self._weight[vocabulary].to(self._operand)
            for tokens in _slices(len(self._targets), self._how.tokens):
                logits, spare = self._logits(tokens, weight)
                columns = self._targets[tokens] - vocabulary.start
                absorb(logits, sums.part(tokens), columns, entropy=entropy, spare=spare)

    def gradients(
        self, sums: RowSums, cotangents: Cotangents, *, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of hidden states and weight, where wanted."""
        # What `differentiate` leaves out; `per_row` with what the temperature adds.
        rest = -sums.total.reciprocal()
        if cotangents.entropies is None:
            rest = rest * cotangents.log_probs
        per_row = rest * self._factor
        of_hidden = torch.zeros_like(self._states, dtype=self.precise) if wanted[0] else None
        of_weight = torch.zeros_like(self._weight) if wanted[1] else None
        states = (self._states * (rest if self._divided else per_row)[:, None]).to(self._operand) if wanted[1] else None
        for vocabulary in _slices(len(self._weight), self._how.vocabulary):
            weight = self._weight[vocabulary].to(self._operand)
            # Summed in place where its type allows, else cast once.
            summed = None if of_weight is None else of_weight[vocabulary].to(self.precise)
            for tokens in _slices(len(self._targets), self._how.tokens):
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
        """[n, v] logits, over the temperature already if states are, and as much room again."""
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
