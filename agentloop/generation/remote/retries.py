"""How long to wait before a turn is asked again."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

_FIRST_S = 0.25
_LONGEST_S = 8.0


def pause_before_retry(tries: int, retry_after_s: float | None, chance: random.Random) -> float:
    """Seconds to wait after `tries` tries: they double, by chance up to half more or less, but never less than asked.

    Chance keeps the episodes of a batch, which all fail at once, from coming back at once.
    """
    pause: float = min(_FIRST_S * 2 ** (tries - 1), _LONGEST_S) * chance.uniform(0.5, 1.5)
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
