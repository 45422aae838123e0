"""The beginning of an episode that continues a stored one (PrefixRL, arXiv 2601.18795)."""

from dataclasses import dataclass

from agentloop.environments import StoredTask
from context.messages import Message
from context.tokens.token_sequence import TokenSequence


@dataclass(frozen=True)
class KeptTurn:
    """A reply of a stored episode with the messages after it."""

    reply: TokenSequence
    """The reply's tokens with the log-probs and policy versions of their sampling."""
    messages: tuple[Message, ...]
    """The reply, then the tool results."""


@dataclass(frozen=True, kw_only=True)
class Restart(StoredTask):
    """A task whose episodes begin after these turns of a stored success."""

    parent: str
    """The id of the stored success."""
    turns: tuple[KeptTurn, ...]
