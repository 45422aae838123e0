"""What an agent asks and is given, whichever protocol it speaks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from context.messages import Message
from context.wording import visible


@dataclass(frozen=True)
class AgentRequest:
    model: str
    """As the agent wrote it."""
    agent: str
    """Who asks, as the agent calls itself; empty where it does not say."""
    aside: bool
    """True: asked beside the task; answered, and never trained."""
    messages: tuple[Message, ...]
    """The whole conversation; calls have the ids that the agent gave them."""
    tools: list[dict[str, Any]]
    """In OpenAI's form, with names, descriptions and parameters alone; empty where the reply may use none."""
    max_tokens: int | None
    """The most tokens that the reply may have; None: the agent does not say."""
    stream: bool
    overruled: tuple[str, ...]
    """Fields that the agent set and the run's settings stand above, or that the policy is not shown."""
    body: Mapping[str, Any] = field(repr=False)
    """As the agent sent it."""


@dataclass(frozen=True)
class AgentReply:
    id: str
    """A plain word, another one for each reply of a gateway."""
    message: Message
    """Each of its calls has an id."""
    finish: Literal["stop", "tool_calls", "length"]
    prompt_tokens: int
    completion_tokens: int
    created: int
    """Seconds since 1970."""
    cached_tokens: int = 0
    """Tokens of the prompt that the engine had seen already."""


Given = Callable[[str], AgentReply | None]
"""The reply of an id, where the session gave one of that id."""


class BadRequest(Exception):
    """What the agent sent can't be answered; each protocol writes it as its provider does."""

    def __init__(self, status: int, message: str, field: str | None = None, code: str | None = None) -> None:
        """`field`: the one that is to be changed; `code`: what OpenAI calls the kind of error."""
        super().__init__(visible(message))
        self.status = status
        self.field = field
        self.code = code


class NoRoom(BadRequest):
    """The prompt leaves no room for a reply: agents that shorten their conversations know it by its wording."""

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        """`limit`: the most tokens that prompt and reply may have together."""
        super().__init__(
            400,
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages.",
            "messages",
            "context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit
