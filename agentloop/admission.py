"""What a person brings to the buffer: a sampler and a redactor of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agentloop.class_file import load_class, load_function
from agentloop.errors import UserError, one_line_with_place
from context.messages import Message
from replay.config import ReplayConfig
from replay.sampling.samplers import Sampler, make_sampler
from replay.storage.write import Admission, Redactor


def make_admission(config: ReplayConfig) -> Admission:
    return Admission(config.dedupe, None if config.redact is None else load_redactor(config.redact))


def load_sampler(config: ReplayConfig, seed: int) -> Sampler:
    """The configured one. Runs the file of a sampler of one's own; raises UserError for what does not fit."""
    if ":" not in config.sampler:
        return make_sampler(config.sampler, seed, config.sampler_options)
    kind = load_class(config.sampler, what="replay.sampler")
    if not issubclass(kind, Sampler):
        raise UserError(
            f"replay.sampler must name a subclass of replay.Sampler, got {config.sampler!r}. "
            "Derive it, and give every row a weight."
        )
    try:
        made = make_sampler(kind, seed, config.sampler_options)
        made.try_out()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"replay.sampler must be a sampler that weighs rows, got {config.sampler!r} with "
            f"{one_line_with_place(error)}. Mend it."
        ) from error
    return made


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
