"""What a strategy is asked, and what it may answer."""

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
    """What the policy said to a strategy's question."""

    text: str
    truncated: bool


class Measure(Protocol):
    def __call__(self, messages: Sequence[Message], *, tools: bool = True) -> int:
        """Tokens of the prompt that shows these messages, exactly. Without `tools`: as a question is shown."""


@dataclass(frozen=True)
class History:
    """What is shown now, and what the next prompt would add."""

    opening: tuple[Message, ...]
    """The initial messages, and what strategies put after them."""
    turns: tuple[Turn, ...]
    """Oldest first. The newest one's results have not been shown yet."""
    prompt_tokens: int
    """Length of the next prompt if nothing is changed."""
    max_tokens: int
    """What a prompt and its reply must fit into."""
    measure: Measure
    count: Callable[[Message], int]
    """Tokens of a message's contents, without what the template writes around them. Cheap."""
    answer: Answer | None
    """To the question this strategy asked about this same history; None: it has asked none."""

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
    """Show these messages from now on. A new segment begins, unless they only extend what was shown."""

    messages: tuple[Message, ...]
    kind: str
    """What was done, for counting."""


@dataclass(frozen=True)
class Question:
    """Ask the policy, in a segment of its own and without tools, and come back with the answer."""

    messages: tuple[Message, ...]
    max_answer_tokens: int
    train_answers: bool
    example: str
    """An answer that would do: what a demonstration answers."""


@dataclass(frozen=True)
class Stop:
    """The episode can't go on."""

    reason: str


Arrangement = Append | Rewrite | Question | Stop


class Strategy(Protocol):
    """Decides what the next prompt shows. Holds settings only: what an episode has come to is in its history."""

    def arrange(self, history: History) -> Arrangement:
        """Called after each observation, and again with the answer after each `Question`."""

    def hinted(self, opening: Sequence[Message], hint: str | None) -> tuple[Message, ...]:
        """The initial messages as the policy sees them while it samples; training sees them as they are."""
        return tuple(opening)


def check_tokens(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1 token, got {value}.")
