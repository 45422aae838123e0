"""Where an episode begins that goes on from a stored one (PrefixRL, arXiv 2601.18795)."""

from dataclasses import dataclass

from agentloop.environments import StoredTask
from context.messages import Message
from context.tokens.token_sequence import TokenSequence


@dataclass(frozen=True)
class KeptTurn:
    """A reply of a stored episode, and what followed it."""

    reply: TokenSequence
    """With the log-probs and policy versions it was sampled with."""
    messages: tuple[Message, ...]
    """The reply first."""


@dataclass(frozen=True, kw_only=True)
class Restart(StoredTask):
    """A task whose episodes begin behind these turns of a stored success."""

    parent: str
    """The success's id."""
    turns: tuple[KeptTurn, ...]
