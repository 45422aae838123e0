"""How a per-token quantity of one update was spread: fixed bins, so that histograms of any updates can be added up.

Counted is x = ln(ratio) or ln(drift), symmetric around 0, in nats. Bins are centred on multiples of their width, and
five of a width make one of the next, with no edge of a wider bin within a narrower one:

    |x| <  0.125   width 0.01    a fresh stream: 1 is the middle of a bin, not the edge of two
    |x| <  1.125   width 0.05
    |x| <  3.125   width 0.25    a stale one
    |x| < 10.625   width 1.25    logs are clamped to 20 before they are counted

and one bin for everything below, one for everything above: 95 in all. A bin holds its lower edge and not its upper
one. NaN is in no bin: what is not known is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from replay.storage.format.encoding import decode_counts, encode_counts

Counts = npt.NDArray[np.int64]
"""[BINS], from the lowest bin to the highest."""

_UNITS = 200
"""To a nat; every edge is an odd number of them."""
_FEWEST = 6
"""Bins on a side of the middle one that are always drawn."""
_REGIONS = ((25, 2), (225, 10), (625, 50), (2125, 250))
"""Up to how many units bins are how wide."""


def _edges() -> tuple[float, ...]:
    upper = [1]
    for end, width in _REGIONS:
        upper += range(upper[-1] + width, end + 1, width)
    return tuple(unit / _UNITS for unit in [-edge for edge in reversed(upper)] + upper)


EDGES = _edges()
"""Nats, ascending: between the first and the last stand all bins but the outermost two."""
BINS = len(EDGES) + 1
COUNTS_RULE = f"be {BINS} whole numbers >= 0"


def encode(counts: Counts) -> bytes:
    """Raises ValueError for anything but a count for each bin."""
    if not is_counts(counts):
        raise ValueError(f"counts must {COUNTS_RULE}, got {counts!r}.")
    return encode_counts(counts)


def is_counts(counts: npt.NDArray[Any]) -> bool:
    return counts.shape == (BINS,) and np.issubdtype(counts.dtype, np.integer) and bool(counts.min() >= 0)


def decode(blob: bytes) -> Counts:
    """From `encode`; raises BlobError for any other blob."""
    return decode_counts(blob, BINS)


def count(logs: npt.ArrayLike) -> Counts:
    """The counts of any number of logs, in nats."""
    values = np.asarray(logs, np.float64).ravel()
    places = np.searchsorted(EDGES, values[~np.isnan(values)], side="right")
    return np.bincount(places, minlength=BINS).astype(np.int64)


def merged(counts: Iterable[Counts]) -> Counts:
    """The counts of all of them together."""
    total = np.zeros(BINS, np.int64)
    for each in counts:
        total += each
    return total


def quantile_bounds(counts: Counts, share: float) -> tuple[float, float] | None:
    """Between which values, not logs, the one of rank ceil(share x tokens) lies: its bin's lower and upper edge.

    0 and infinity beyond the outermost edges; None without tokens.
    """
    tokens = int(counts.sum())
    if not tokens:
        return None
    rank = min(tokens, max(1, math.ceil(share * tokens)))
    place = int(np.searchsorted(np.cumsum(counts), rank))
    lower, upper = bounds(place)
    return math.exp(lower), math.exp(upper)


def quantile(counts: Counts, share: float) -> float | None:
    """The middle, in nats, of the bin it lies in, as a value; of an outermost bin the edge it has."""
    found = quantile_bounds(counts, share)
    if found is None:
        return None
    lower, upper = found
    if lower == 0.0 or math.isinf(upper):
        return upper if lower == 0.0 else lower
    return math.sqrt(lower * upper)


def bounds(place: int) -> tuple[float, float]:
    """Nats: the edges of a bin."""
    return (-math.inf, *EDGES)[place], (*EDGES, math.inf)[place]


_MIDDLES = [(lower + upper) / 2 for lower, upper in map(bounds, range(BINS))]
"""The middle of each bin, by which the wider one it is in is found; infinite for the outermost two."""


@dataclass(frozen=True)
class Scale:
    """Equally wide bins in which histograms are drawn beside each other, symmetric around a ratio of 1."""

    width: int
    """Units; one of the widths bins have."""
    half: int
    """Bins on each side of the middle one."""

    @property
    def edges(self) -> tuple[float, ...]:
        """Nats, ascending. What lies outside is drawn in one bin below the first and one above the last."""
        lowest = -self.width * (2 * self.half + 1) // 2
        return tuple((lowest + self.width * step) / _UNITS for step in range(2 * self.half + 2))

    def of(self, counts: Counts) -> Counts:
        """[2 half + 3]: the same tokens in these bins."""
        found = np.zeros(2 * self.half + 3, np.int64)
        np.add.at(found, np.searchsorted(self.edges, _MIDDLES), counts)
        return found


def scale_for(each: Sequence[Counts]) -> Scale:
    """The narrowest bins, and the fewest of them, that leave out no more than 2 of 100 tokens of each.

    A fresh stream near 1 and one that is far away are both to be read.
    """
    found = Scale(_REGIONS[0][1], _FEWEST)
    for end, width in _REGIONS:
        for half in range(_FEWEST, (2 * end // width - 1) // 2 + 1):
            found = Scale(width, half)
            if all(_outside(found.of(counts)) <= 0.02 * counts.sum() for counts in each):
                return found
    return found


def _outside(drawn: Counts) -> int:
    return int(drawn[0] + drawn[-1])
