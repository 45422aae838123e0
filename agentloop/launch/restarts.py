"""When a role that has ended is started again, and when not any more."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

MOST_ENDS = 5
"""So many ends within `WINDOW_S`, or refusals in a row however slow, and the launch gives up."""
WINDOW_S = 60.0
_LONGEST_WAIT_S = 30.0
_REFUSED = 2
"""Exit code of what the user can mend."""


class Restarts:
    """The ends of one role."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=MOST_ENDS)
        self._refusals = 0
        self._wait_s = 0.0

    def ended(self, code: int, *, now: float, ran_s: float) -> float | None:
        """Seconds to wait before the next start: 1, 2, 4, ... and from 1 again after a minute's run; None: no more."""
        self._ends.append(now)
        self._refusals = self._refusals + 1 if code == _REFUSED else 0
        often = len(self._ends) == MOST_ENDS and now - self._ends[0] <= WINDOW_S
        if often or self._refusals == MOST_ENDS:
            return None
        self._wait_s = 1.0 if ran_s > WINDOW_S or not self._wait_s else min(2 * self._wait_s, _LONGEST_WAIT_S)
        return self._wait_s


def was_killed(code: int) -> bool:
    """Whether an exit code stands for a signal, and not for what the command itself found."""
    return code < 0 or code > 128


def in_words(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def last_words(lines: Sequence[str]) -> str:
    """The end of what it printed, on one line."""
    return " / ".join(line.strip() for line in lines if line.strip())[-600:] or "it said nothing"
