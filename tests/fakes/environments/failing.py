"""Environments that go wrong where a worker runs them; which way, AGENTLOOP_TEST_FAULT says."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from agentloop import Task
from context import Message
from tests.fakes.environments.parity import Parity


class Failing(Parity):
    """`poison`: a task in four ends its process. `raise`: no episode starts. `endless`: none ever does."""

    def start(self, task: Task) -> None:
        if threading.current_thread() is threading.main_thread():
            return  # it is only looked at, before any episode
        fault = os.environ.get("AGENTLOOP_TEST_FAULT")
        if fault == "poison" and task.payload["number"] % 4 == 0:
            os._exit(9)
        if fault == "raise":
            raise ConnectionError("no answer")
        if fault == "endless":
            threading.Event().wait()


def unlucky(episode: object) -> float:
    """A reward function that can't say what some replies earn."""
    messages: Sequence[Message] = episode.messages  # type: ignore[attr-defined]
    if len(messages[-1].content) % 2:
        raise LookupError("no reward for this one")
    return 1.0
