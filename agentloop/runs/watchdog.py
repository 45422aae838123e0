"""Ends this process from outside of it, when a tool leaves its own signal handlers no chance.

C code that keeps the interpreter's lock (`sum` over something endless) keeps every handler from
running. Python's wakeup file descriptor is written to all the same, and a process that reads it counts the signals.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

GRACE_S = 3.0
"""From the second signal on."""
_COUNT = """
import os, select, signal, sys
parent, grace, seen = int(sys.argv[1]), float(sys.argv[2]), 0
while number := os.read(0, 1):
    seen += number[0] in (signal.SIGINT, signal.SIGTERM)
    if seen == 2:
        ended, _, _ = select.select([0], [], [], grace)
        if not (ended and not os.read(0, 1)):
            os.kill(parent, signal.SIGKILL)
        break
"""


@contextmanager
def watched() -> Iterator[None]:
    """Within, a second Ctrl-C or SIGTERM ends this process after some seconds, whatever it is doing."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    command = [sys.executable, "-I", "-S", "-c", _COUNT, str(os.getpid()), str(GRACE_S)]
    counter = subprocess.Popen(command, stdin=reading, start_new_session=True)
    os.close(reading)
    previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        os.close(writing)
        counter.kill()
        counter.wait()
