"""What rows go through on their way into the buffer, and what the buffer has room for, as a run is configured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agentloop.class_file import load_function
from agentloop.config import ReplaySection
from agentloop.errors import UserError, one_line_with_place
from context.messages import Message
from replay.storage.retention import Capacity
from replay.storage.write import Admission, Redactor


def make_admission(section: ReplaySection) -> Admission:
    return Admission(section.dedupe, None if section.redact is None else load_redactor(section.redact))


def make_capacity(section: ReplaySection) -> Capacity:
    return Capacity(**section.capacity.model_dump())


def load_redactor(spec: str) -> Redactor:
    """The user's function, whose answers are checked: what it fails on must not be stored as it is."""
    function: Callable[..., Any] = load_function(spec, what="replay.redact")

    def redact(messages: tuple[Message, ...]) -> Sequence[Message] | None:
        try:
            redacted = function(messages)
        except Exception as error:
            raise UserError(
                f"replay.redact must take every trajectory's messages, got {one_line_with_place(error)} from {spec}. "
                "Nothing of the iteration was stored; mend the function and run again with --resume."
            ) from error
        if redacted is None:
            return None
        if not isinstance(redacted, (list, tuple)) or not all(isinstance(message, Message) for message in redacted):
            raise UserError(
                f"replay.redact must return messages or None, got {type(redacted).__name__} from {spec}. "
                "Change messages with dataclasses.replace(message, content=...)."
            )
        return redacted

    return redact
