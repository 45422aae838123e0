"""Ages of replayed rows, in buckets: the oldest go bad first, which a mean over all ages hides."""

from __future__ import annotations


def age_bucket(staleness: int | None) -> str:
    """Buckets that double: 0, 1, 2-3, 4-7, 8-15, ...; `unknown` for rows of other runs."""
    if staleness is None:
        return "unknown"
    if staleness < 2:
        return str(staleness)
    first = 1 << (staleness.bit_length() - 1)
    return f"{first}-{2 * first - 1}"
