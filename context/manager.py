"""The one object a rollout talks to: it knows the exact tokens of an episode, and who wrote each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from context.authors import DISCARD_SUFFIX, INITIALIZATION, LLM, USER
from context.messages import Message
from context.parse import Reply, ReplyParser
from context.render import Renderer
from context.tokens import Segment, TokenSequence


class ContextManager:
    """Token in, token out: every prompt is the tokens before it and what was appended, never re-tokenised.

    The linear strategy: all is kept, in one segment. One object per episode: `begin`, then `record_reply` and
    `observe` in turn.
    """

    def __init__(self, renderer: Renderer, parser: ReplyParser, *, max_tokens: int) -> None:
        self._renderer = renderer
        self._parser = parser
        self._max_tokens = max_tokens
        self._parts: list[TokenSequence] = []
        self._ids: list[int] = []
        self._messages: list[Message] = []
        self._last: Reply | None = None
        """The reply that waits for an observation; None while the policy is to speak."""

    def begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        """Render the first prompt: any number of messages, few-shot assistant messages among them."""
        if self._parts:
            raise RuntimeError("begin must be called once. Make a ContextManager per episode.")
        if not messages:
            raise ValueError("messages must hold at least one message, got none.")
        given = self._not_sampled(messages)
        self._append(self._renderer.initial(_shown(given), tools), given)

    @property
    def prompt_ids(self) -> list[int]:
        """The exact tokens the generator must see next."""
        return list(self._ids)

    @property
    def room(self) -> int:
        """Tokens left under `max_tokens`; below 1, no reply fits."""
        return self._max_tokens - len(self._ids)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, for people, rewards and storage."""
        return tuple(self._messages)

    def record_reply(self, token_ids: Sequence[int], log_probs: Sequence[float], *, policy_version: int) -> Reply:
        """Append what the policy sampled, verbatim, and read it.

        One log-prob per token, in nats; all NaN for a reply that no known policy sampled (a demonstration).
        A reply that does not end in a stop token was cut by a length limit: `truncated`, with no end added.
        """
        if not self._parts or self._last is not None:
            raise RuntimeError("record_reply must follow begin or observe.")
        self._check_reply(token_ids, log_probs, policy_version)
        n = len(token_ids)
        stopped = token_ids[-1] in self._renderer.stop_ids
        text = self._renderer.codec.decode(token_ids[: n - stopped])
        reply = self._parser.parse(text, stopped=stopped)
        sampled = TokenSequence(
            np.array(token_ids, np.int32),
            np.full(n, self._renderer.authors.code(LLM), np.uint8),
            np.array(log_probs, np.float32),
            np.full(n, policy_version, np.int32),
        )
        self._append(sampled, [reply.message])
        self._last = reply
        return reply

    def observe(self, messages: Sequence[Message]) -> bool:
        """Append tool results (or what else follows a reply) and the generation prompt.

        False: they would not leave room for one more token; nothing was appended, nothing is lost.
        """
        if self._last is None or self._last.outcome == "truncated":
            raise RuntimeError("observe must follow a reply that ended its turn.")
        given = self._not_sampled(messages)
        increment = self._renderer.increment(self._last.message, _shown(given))
        if len(increment) >= self.room:
            return False
        self._append(increment, given)
        self._last = None
        return True

    def segments(self) -> tuple[Segment, ...]:
        """The training sequences so far: here one, everything the policy saw and said."""
        return (Segment(TokenSequence.concatenate(self._parts)),)

    def _append(self, tokens: TokenSequence, messages: Sequence[Message]) -> None:
        self._parts.append(tokens)
        self._ids += tokens.token_ids.tolist()
        self._messages += messages

    def _check_reply(self, token_ids: Sequence[int], log_probs: Sequence[float], policy_version: int) -> None:
        n = len(token_ids)
        if not 1 <= n <= self.room:
            raise ValueError(f"token_ids must hold 1 to {self.room} tokens (the room left), got {n}.")
        if min(token_ids) < 0:
            raise ValueError(f"token_ids must not be negative, got {min(token_ids)}.")
        if len(log_probs) != n:
            raise ValueError(f"log_probs must have one entry per token ({n}), got {len(log_probs)}.")
        unknown = sum(map(math.isnan, log_probs))
        if unknown not in (0, n) or any(map(math.isinf, log_probs)):
            raise ValueError("log_probs must be finite, or all NaN, got something between. Mend what sampled them.")
        if policy_version < 0:
            raise ValueError(f"policy_version must be >= 0, got {policy_version}.")

    def _not_sampled(self, messages: Sequence[Message]) -> list[Message]:
        """Messages from outside. Assistant messages among them were not sampled: `initialization`."""
        authors = self._renderer.authors
        rows = []
        for message in messages:
            if message.role == "assistant" and message.author == USER:  # what a Message says that names no author
                message = replace(message, author=INITIALIZATION)
            if authors.is_action(np.array([authors.code(message.author)], np.uint8))[0]:
                raise ValueError(
                    f"messages.author must not be one whose tokens are sampled, got {message.author!r} "
                    f"for a given {message.role} message. Use {INITIALIZATION!r}."
                )
            rows.append(message)
        return rows


def _shown(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if not message.author.endswith(DISCARD_SUFFIX)]
