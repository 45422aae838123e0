"""How long to wait before a turn is asked again."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

_LONGEST_S = 4.0


def pause_before_retry(tries: int, retry_after_s: float | None, first_s: float, chance: random.Random) -> float:
    """Seconds to wait after `tries` tries: `first_s`, then doubling, by chance up to half more or less.

    They are never less than the server asked for.

    Chance keeps the episodes of a batch, which all fail at once, from coming back at once.
    """
    pause: float = min(first_s * 2 ** (tries - 1), _LONGEST_S) * chance.uniform(0.5, 1.5)
    return max(pause, retry_after_s or 0.0)


def read_retry_after(header: str | None) -> float | None:
    """Seconds from a `Retry-After` header, which holds seconds or a date; None where it says nothing."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        moment = parsedate_to_datetime(header)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max((moment - datetime.now(UTC)).total_seconds(), 0.0)
