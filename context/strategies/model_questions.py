"""Strategies that ask the policy itself what stays in sight."""

import re
from dataclasses import dataclass, replace

from context.authors import MEMORY
from context.messages import Message, below
from context.strategies.protocol import (
    CONTEXT_FULL,
    SUMMARY_TOO_LONG,
    Append,
    Arrangement,
    History,
    Question,
    Rewrite,
    Stop,
    Strategy,
    Turn,
    check_tokens,
    shown,
)
from context.strategies.rules import fits, newest_turns, prompt_limit, suffixes

_ASK_SUMMARY = (
    "The conversation above is about to be removed. Write down, in a few short lines, everything from it that you "
    "need to finish the task. Write only these notes."
)
_NOTES_HEAD = "Your notes on the conversation so far:\n"
_ASK_CLIP = (
    "The conversation has grown too long. Its earlier messages are:\n{listing}\n\nFor each message, answer with one "
    "line: its number, and keep, remove, or compress followed by a colon and a shorter text. Write only these lines."
)
_DECISION = re.compile(r"[\s>*#\[(-]*(\d{1,6})[\s\])*:.,-]*\b(keep|remove|compress)\b[\s*:]*(.*)", re.IGNORECASE)
_REMOVED = "[removed]"
_NOTED = 3


@dataclass(frozen=True)
class Memory(Strategy):
    """Asks the policy for notes when a prompt exceeds `budget` tokens. The notes replace the oldest turns."""

    budget: int
    max_summary_tokens: int = 256
    train_answers: bool = True

    def __post_init__(self) -> None:
        check_tokens("budget", self.budget)
        check_tokens("max_summary_tokens", self.max_summary_tokens)

    def arrange(self, history: History) -> Arrangement:
        if fits(history, self.budget):
            return Append()
        *first, last = history.opening
        initial = (*first, replace(last, note=""))
        limit = prompt_limit(history, self.budget)
        kept = self._kept(history, initial, limit)
        if kept is None:
            return Stop(CONTEXT_FULL)
        if history.answer is None:
            gone = history.turns[: len(history.turns) - len(kept)]
            asked = _asking(shown(history.opening, gone), _ASK_SUMMARY)
            if history.measure(asked, tools=False) + self.max_summary_tokens > history.max_tokens:
                return Stop(CONTEXT_FULL)
            # The newest thoughts are enough to learn what notes look like.
            example = ", ".join(turn.reply.reasoning or turn.reply.content for turn in gone[-_NOTED:])
            return Question(asked, self.max_summary_tokens, self.train_answers, example)
        messages = shown(_with_notes(initial, history.answer.text), kept)
        if history.answer.truncated or history.measure(messages) > limit:
            return Stop(SUMMARY_TOO_LONG)
        return Rewrite(messages, "summarise")

    def _kept(self, history: History, initial: tuple[Message, ...], limit: int) -> tuple[Turn, ...] | None:
        """The newest turns that fit next to notes of full length. At least one turn goes, and one stays."""
        for kept in suffixes(history, initial, limit - self.max_summary_tokens):
            if len(kept) == len(history.turns):
                continue
            if history.measure(shown(_with_notes(initial, ""), kept)) + self.max_summary_tokens <= limit:
                return kept
        return None


def _with_notes(opening: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """The opening with the notes below its last message: many templates take no two user messages in a row."""
    return (*opening[:-1], replace(opening[-1], note=_NOTES_HEAD + text.strip()))


def _asking(messages: tuple[Message, ...], question: str) -> tuple[Message, ...]:
    *before, last = messages
    if last.role != "user":
        return (*messages, Message("user", question, author=MEMORY))
    return (*before, replace(last, note=below(last.note, question)))


@dataclass(frozen=True)
class SelfClip(Strategy):
    """Asks the policy which earlier messages to keep, remove or compress when a prompt outgrows `budget` tokens.

    The newest turns that fit are shown where an answer can't be read, or does not save enough. They are counted apart.
    """

    budget: int
    train_answers: bool = True
    max_answer_tokens: int = 256
    excerpt_chars: int = 200

    def __post_init__(self) -> None:
        check_tokens("budget", self.budget)
        check_tokens("max_answer_tokens", self.max_answer_tokens)

    def arrange(self, history: History) -> Arrangement:
        if fits(history, self.budget):
            return Append()
        earlier = [message for turn in history.turns[:-1] for message in turn.messages]
        if earlier and history.answer is None:
            listing = "\n".join(f"{number}. {self._excerpt(message)}" for number, message in enumerate(earlier, 1))
            asked = _asking(history.opening, _ASK_CLIP.format(listing=listing))
            if history.measure(asked, tools=False) + self.max_answer_tokens <= history.max_tokens:
                example = "\n".join(f"{number}. remove" for number in range(1, len(earlier) + 1))
                return Question(asked, self.max_answer_tokens, self.train_answers, example)
        if earlier and history.answer is not None:
            decisions = _read_decisions(history.answer.text, len(earlier))
            messages = shown(history.opening, (*_decided(history.turns[:-1], decisions), history.turns[-1]))
            if decisions and history.measure(messages) <= prompt_limit(history, self.budget):
                return Rewrite(messages, "self_clip")
        return newest_turns(history, self.budget, kind="self_clip_fallback")

    def _excerpt(self, message: Message) -> str:
        calls = " ".join(f"{call.name}({dict(call.arguments)})" for call in message.tool_calls)
        text = " ".join(f"{message.content} {calls}".split())
        cut = text if len(text) <= self.excerpt_chars else text[: self.excerpt_chars] + " ..."
        return f"{message.role}: {cut} ({len(text)} characters)"


def _read_decisions(text: str, count: int) -> dict[int, tuple[str, str]]:
    """Message number -> (keep | remove | compress, shorter text). The last line on a message counts."""
    found = {}
    for line in text.splitlines():
        match = _DECISION.match(line)
        if match and 1 <= int(match[1]) <= count:
            found[int(match[1])] = (match[2].lower(), match[3].strip())
    return found


def _decided(turns: tuple[Turn, ...], decisions: dict[int, tuple[str, str]]) -> list[Turn]:
    """The turns after the decisions. A reply goes only together with all its results: templates pair them."""
    kept: list[Turn] = []
    number = 0
    for turn in turns:
        verbs = [decisions.get(number + 1 + i, ("keep", "")) for i in range(len(turn.messages))]
        number += len(turn.messages)
        if all(verb == "remove" for verb, _ in verbs):
            continue
        reply, *results = (_clipped(message, *verb) for message, verb in zip(turn.messages, verbs, strict=True))
        kept.append(Turn(reply, tuple(results)))
    return kept


def _clipped(message: Message, verb: str, shorter: str) -> Message:
    if verb == "keep":
        return message
    is_reply = message.role == "assistant"
    if verb == "remove":
        # A call stays, as it says what its result answers.
        return replace(message, content="" if message.tool_calls else _REMOVED, reasoning=None)
    author = message.author if is_reply else MEMORY
    return replace(message, content=shorter or _REMOVED, reasoning=None, author=author)
