"""Exact rounding of shares to whole parts by the largest remainder, once or over many iterations."""

from collections.abc import Mapping, Sequence
from fractions import Fraction


def apportion(total: int, shares: Sequence[float | Fraction]) -> list[int]:
    """Divide `total` into whole parts in proportion to `shares` (Hamilton's method of the largest remainder).

    The parts sum to exactly `total`, and each is within one of its exact quota. Of equal remainders, the first is
    rounded up. Shares are at least 0, and need not sum to 1.
    """
    return _round(total, _quotas(total, shares))


class Remainders:
    """Remainders divide totals call after call and carry over what was rounded off, so that sums follow the shares."""

    def __init__(self) -> None:
        self._left: dict[str, list[Fraction]] = {}

    def split(self, name: str, total: int, shares: Sequence[float | Fraction]) -> list[int]:
        """Divide `total` into whole parts. Calls of the same `name` share their remainders.

        After every call, the sum of a part stays within 1/2 of its exact value if there are two parts, and within one
        or two if there are more.
        """
        before = self._left.get(name, [Fraction(0)] * len(shares))
        quotas = [quota + left for quota, left in zip(_quotas(total, shares), before, strict=True)]
        parts = _round(total, quotas)
        self._left[name] = [quota - part for quota, part in zip(quotas, parts, strict=True)]
        return parts

    def state(self) -> dict[str, list[str]]:
        """Return the exact remainders as plain JSON values, for the checkpoint."""
        return {name: [str(part) for part in parts] for name, parts in self._left.items()}

    def load_state(self, state: Mapping[str, Sequence[str]]) -> None:
        self._left = {name: [Fraction(part) for part in parts] for name, parts in state.items()}


def group_sizes(rows: int, group_size: int) -> list[int]:
    """Divide `rows` trajectories into ceil(rows / group_size) groups, as even as possible, larger ones first."""
    count = -(-rows // group_size)
    return [rows // count + (i < rows % count) for i in range(count)]


def _quotas(total: int, shares: Sequence[float | Fraction]) -> list[Fraction]:
    exact = [Fraction(share) for share in shares]
    return [total * share / sum(exact) for share in exact]


def _round(total: int, quotas: Sequence[Fraction]) -> list[int]:
    """Round `quotas`, which sum to `total`, to whole parts >= 0. A quota may be negative by a carried debt."""
    parts = [max(0, quota.__floor__()) for quota in quotas]
    while (missing := total - sum(parts)) != 0:
        gap = [quota - part for quota, part in zip(quotas, parts, strict=True)]
        if missing > 0:
            parts[max(range(len(parts)), key=gap.__getitem__)] += 1
        else:
            parts[min((i for i, part in enumerate(parts) if part), key=gap.__getitem__)] -= 1
    return parts
