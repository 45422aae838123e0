"""An agent's request and the reply to it, in one form for all protocols."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from context.messages import Message
from context.wording import visible


@dataclass(frozen=True)
class AgentRequest:
    model: str
    """The model's name as the agent wrote it."""
    agent: str
    """The agent's own name; empty where it gives none."""
    aside: bool
    """True: the request is not part of the task. It is answered, and its reply is never trained."""
    messages: tuple[Message, ...]
    """The whole conversation. Calls have the ids that the agent gave them."""
    tools: list[dict[str, Any]]
    """Tools in OpenAI's form, with only name, description and parameters; empty where the reply may use none."""
    max_tokens: int | None
    """The most tokens that the reply may have; None: the agent sets no limit."""
    stream: bool
    overruled: tuple[str, ...]
    """Fields that the agent set without effect: the run's settings decide, or the policy is not shown them. And the
    fields of `instructed`, which the reply may disobey."""
    body: Mapping[str, Any] = field(repr=False)
    """The request's JSON as the agent sent it."""
    instructed: tuple[str, ...] = ()
    """Fields that no engine obeys. An instruction that `messages` hold asks the policy for what they ask."""
    stop: tuple[str, ...] = ()
    """Texts that end the reply. Its message ends before them."""
    log_probs: bool = False
    """True: the answer shows the log-probs of the sampled tokens."""


@dataclass(frozen=True)
class AgentReply:
    id: str
    """Letters and digits, different for each reply of a gateway."""
    message: Message
    """The reply's message. Each of its calls has an id."""
    finish: Literal["stop", "tool_calls", "length"]
    prompt_tokens: int
    completion_tokens: int
    created: int
    """Seconds since 1970."""
    cached_tokens: int = 0
    """Tokens of the prompt that earlier requests of the session had already shown to the engine."""
    stop: str | None = None
    """The text of the request's `stop` that ended the reply."""
    log_probs: tuple[tuple[str, float], ...] = ()
    """The sampled tokens as text, each with its log-prob, if the request asks for them."""


FindReply = Callable[[str], AgentReply | None]
"""Finds the reply that a session gave under an id; None where it gave none."""


class BadRequest(Exception):
    """The request can't be answered. Each protocol writes the error as its provider does."""

    def __init__(self, status: int, message: str, field: str | None = None, code: str | None = None) -> None:
        """`field` is the request's field to change; `code` is OpenAI's name for the kind of error."""
        super().__init__(visible(message))
        self.status = status
        self.field = field
        self.code = code


class NoRoom(BadRequest):
    """The prompt leaves no room for a reply. Agents that shorten their conversations recognise the error's wording."""

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        """`limit` is the most tokens that prompt and reply may have together."""
        super().__init__(
            400,
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages.",
            "messages",
            "context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit
