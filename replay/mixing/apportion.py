"""Whole parts of a total, exactly: rounded by largest remainder, at once or over many iterations."""

from collections.abc import Mapping, Sequence
from fractions import Fraction


def apportion(total: int, shares: Sequence[float | Fraction]) -> list[int]:
    """`total` in whole parts proportional to `shares`, which sum to exactly `total` (Hamilton's largest remainder).

    Each part is within one of its exact quota; of equal remainders the first is rounded up. Shares need not sum to 1.
    """
    return _round(total, _quotas(total, shares))


class Remainders:
    """`apportion` again and again, what was rounded off being carried: sums over all calls follow the shares too."""

    def __init__(self) -> None:
        self._left: dict[str, list[Fraction]] = {}

    def split(self, name: str, total: int, shares: Sequence[float | Fraction]) -> list[int]:
        """`total` in whole parts; `name` tells what is divided from what else is.

        Of two parts each sum stays within 1/2 of its exact one after every call, of more parts within one or two.
        """
        before = self._left.get(name, [Fraction(0)] * len(shares))
        quotas = [quota + left for quota, left in zip(_quotas(total, shares), before, strict=True)]
        parts = _round(total, quotas)
        self._left[name] = [quota - part for quota, part in zip(quotas, parts, strict=True)]
        return parts

    def state(self) -> dict[str, list[str]]:
        """JSON-able and exact."""
        return {name: [str(part) for part in parts] for name, parts in self._left.items()}

    def load_state(self, state: Mapping[str, Sequence[str]]) -> None:
        self._left = {name: [Fraction(part) for part in parts] for name, parts in state.items()}


def group_sizes(rows: int, group_size: int) -> list[int]:
    """Sizes of the ceil(rows / group_size) groups of `rows` trajectories: as even as possible, larger first."""
    count = -(-rows // group_size)
    return [rows // count + (i < rows % count) for i in range(count)]


def _quotas(total: int, shares: Sequence[float | Fraction]) -> list[Fraction]:
    exact = [Fraction(share) for share in shares]
    if total < 0 or not exact or min(exact) < 0 or not any(exact):
        raise ValueError(f"shares must be >= 0 with a positive sum and total >= 0, got {list(shares)} of {total}.")
    return [total * share / sum(exact) for share in exact]


def _round(total: int, quotas: Sequence[Fraction]) -> list[int]:
    """Whole parts >= 0 of `quotas`, which sum to `total`; one with a debt from before may be below 0."""
    parts = [max(0, quota.__floor__()) for quota in quotas]
    while (missing := total - sum(parts)) != 0:
        gap = [quota - part for quota, part in zip(quotas, parts, strict=True)]
        if missing > 0:
            parts[max(range(len(parts)), key=gap.__getitem__)] += 1
        else:
            parts[min((i for i, part in enumerate(parts) if part), key=gap.__getitem__)] -= 1
    return parts
