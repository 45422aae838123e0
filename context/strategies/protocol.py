"""The interface between an episode and its strategy: the episode asks before each prompt, the strategy decides."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from context.messages import Message

CONTEXT_FULL = "context_full"
SUMMARY_TOO_LONG = "summary_too_long"
UNRENDERABLE = "unrenderable"


@dataclass(frozen=True)
class Turn:
    reply: Message
    results: tuple[Message, ...]

    @property
    def messages(self) -> tuple[Message, ...]:
        return (self.reply, *self.results)


@dataclass(frozen=True)
class Answer:
    """The policy's answer to a strategy's question."""

    text: str
    truncated: bool


class Measure(Protocol):
    def __call__(self, messages: Sequence[Message], *, tools: bool = True) -> int:
        """Count the exact tokens of a prompt that shows these messages. Without `tools` the prompt is a question's."""


@dataclass(frozen=True)
class History:
    """The conversation as the next prompt would show it if nothing is changed."""

    opening: tuple[Message, ...]
    """The initial messages, and the messages that strategies put after them."""
    turns: tuple[Turn, ...]
    """Oldest first. The results of the newest turn have not been shown yet."""
    prompt_tokens: int
    """Length of the next prompt if nothing is changed."""
    max_tokens: int
    """The limit for a prompt with its reply."""
    measure: Measure
    count: Callable[[Message], int]
    """The tokens of a message's contents, without the template's text around them. This is cheap to ask."""
    answer: Answer | None
    """The answer to the strategy's question about this history. None: the strategy has asked nothing."""

    @property
    def messages(self) -> tuple[Message, ...]:
        return shown(self.opening, self.turns)


def shown(opening: Sequence[Message], turns: Sequence[Turn]) -> tuple[Message, ...]:
    return (*opening, *(message for turn in turns for message in turn.messages))


@dataclass(frozen=True)
class Append:
    """Change nothing: the next prompt extends the last one. After a question it is shown in a new segment."""


@dataclass(frozen=True)
class Rewrite:
    """A decision to show these messages from now on. A new segment begins, unless they only extend the earlier ones."""

    messages: tuple[Message, ...]
    kind: str
    """The name under which the change is counted."""


@dataclass(frozen=True)
class Question:
    """A decision to ask the policy in a separate segment, without tools. The strategy then decides again, with the
    answer."""

    messages: tuple[Message, ...]
    max_answer_tokens: int
    train_answers: bool
    example: str
    """A fitting answer, which demonstrations give."""


@dataclass(frozen=True)
class Stop:
    """The episode can't go on."""

    reason: str


Arrangement = Append | Rewrite | Question | Stop


class Strategy(Protocol):
    """Decides what the next prompt shows. A strategy holds settings alone: the state of an episode is its history."""

    def arrange(self, history: History) -> Arrangement:
        """Decide what the next prompt shows. Called after each observation, and again after each `Question`."""

    def hinted(self, opening: Sequence[Message], hint: str | None) -> tuple[Message, ...]:
        """The initial messages as the policy sees them while it samples; training sees them as they are."""
        return tuple(opening)


def check_tokens(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1 token, got {value}.")
