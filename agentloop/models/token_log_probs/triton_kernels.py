"""The passes over a chunk of logits as one Triton kernel each, for CUDA; the matrix products are cuBLAS's.

Imported only where triton is (`pip install 'agentloop-replay[gpu]'`). On a CPU they run in its interpreter, for tests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentloop.models.token_log_probs.chunked import Cotangents, RowSums, TorchRows

_BLOCK, _WARPS = 4096, 8


@triton.jit  # type: ignore[untyped-decorator]
def _absorb(  # type: ignore[no-untyped-def]
    logits,
    columns,
    factor,
    top,
    total,
    moment,
    target,
    width,
    SCALED: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row per program: each logit is read once."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    highest = tl.load(top + row)
    powers_sum = tl.load(total + row)
    moment_sum = tl.load(moment + row)
    for start in range(0, width, BLOCK):
        places = start + tl.arange(0, BLOCK)
        there = places < width
        x = tl.load(logits + places, mask=there, other=-float("inf"))
        if SCALED:
            x = x * tl.load(factor + row)
        higher = tl.maximum(highest, tl.max(x, axis=0))
        fall = highest - higher
        shrink = tl.exp(fall)
        powers = tl.exp(x - higher)
        if ENTROPY:
            products = tl.where(there, powers * (x - higher), 0.0)
            moment_sum = (moment_sum + fall * powers_sum) * shrink + tl.sum(products, axis=0)
        powers_sum = powers_sum * shrink + tl.sum(powers, axis=0)
        highest = higher
    tl.store(top + row, highest)
    tl.store(total + row, powers_sum)
    tl.store(moment + row, moment_sum)
    column = tl.load(columns + row)
    if (column >= 0) & (column < width):
        x_target = tl.load(logits + column)
        if SCALED:
            x_target = x_target * tl.load(factor + row)
        tl.store(target + row, x_target)


@triton.jit  # type: ignore[untyped-decorator]
def _differentiate(  # type: ignore[no-untyped-def]
    logits,
    gradient,
    columns,
    factor,
    top,
    at_target,
    base,
    slope,
    width,
    SCALED: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of a row per program."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = places < width
    x = tl.load(logits + row * width + places, mask=there, other=0.0)
    if SCALED:
        x = x * tl.load(factor + row)
    fall = x - tl.load(top + row)
    found = tl.exp(fall)
    if ENTROPY:
        found = found * (tl.load(base + row) + tl.load(slope + row) * fall)
    found = tl.where(places == tl.load(columns + row), found - tl.load(at_target + row), found)
    tl.store(gradient + row * width + places, found.to(gradient.dtype.element_ty), mask=there)


class TritonRows(TorchRows):
    """Every pass reads the chunk once."""

    def absorb(self, logits: Tensor, sums: RowSums, columns: Tensor, *, entropy: bool, spare: Tensor) -> None:
        count, width = logits.shape
        with torch.cuda.device_of(logits):
            _absorb[(count,)](
                logits,
                columns,
                sums.top if sums.factor is None else sums.factor,
                sums.top,
                sums.total,
                sums.moment,
                sums.target,
                width,
                SCALED=sums.factor is not None,
                ENTROPY=entropy,
                BLOCK=_block(width),
                num_warps=_WARPS,
            )

    def differentiate(
        self,
        logits: Tensor,
        sums: RowSums,
        columns: Tensor,
        *,
        cotangents: Cotangents,
        operand: torch.dtype,
        spare: Tensor,
    ) -> Tensor:
        count, width = logits.shape
        # In place, but for a smaller type: a block would overwrite what another has not read.
        gradient = (
            logits if operand == logits.dtype else spare.view(-1).view(operand)[: count * width].view(count, width)
        )
        base, slope, at_target = cotangents.of_rows(sums)
        with torch.cuda.device_of(logits):
            _differentiate[(count, triton.cdiv(width, _block(width)))](
                logits,
                gradient,
                columns,
                sums.top if sums.factor is None else sums.factor,
                sums.top,
                at_target,
                base,
                slope,
                width,
                SCALED=sums.factor is not None,
                ENTROPY=cotangents.entropies is not None,
                BLOCK=_block(width),
                num_warps=_WARPS,
            )
        return gradient


def _block(width: int) -> int:
    return int(min(_BLOCK, triton.next_power_of_2(width)))
