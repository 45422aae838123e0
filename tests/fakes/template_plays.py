"""A scripted conversation played through `ContextManager`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from context import ContextManager, Message, Reply, loss_mask, response_mask
from context.strategies import (
    Append,
    Arrangement,
    ClipToolResults,
    Hint,
    History,
    Linear,
    LinearThink,
    Memory,
    Rewrite,
    SelfClip,
    SlidingWindow,
    Strategy,
)
from tests.fakes.conversations import ScriptedParser
from tests.fakes.prompt_checks import Counts, PromptChecks
from tests.fakes.scripted_conversations import ScriptedConversation
from tests.fakes.template_reference import Subject, Tools

OTHER_TOKENS = "linear_other_tokens"
"""Linear, with replies that are sampled letter by letter."""
STRATEGIES = (
    "linear",
    OTHER_TOKENS,
    "linear_think",
    "sliding_window",
    "clip_tool_results",
    "memory",
    "self_clip",
    "hint",
)


@dataclass
class RecordingStrategy(Strategy):
    """Another strategy, and what it last asked for."""

    strategy: Strategy
    arrangement: Arrangement | None = None
    measured: tuple[Message, ...] | None = None
    """What it measured last, while it was deciding."""
    tools_measured: bool = True

    def arrange(self, history: History) -> Arrangement:
        def measure(messages: Sequence[Message], *, tools: bool = True) -> int:
            self.measured, self.tools_measured = tuple(messages), tools
            return history.measure(messages, tools=tools)

        self.arrangement = self.strategy.arrange(replace(history, measure=measure))
        return self.arrangement

    def hinted(self, opening: Sequence[Message], hint: str | None) -> tuple[Message, ...]:
        return self.strategy.hinted(opening, hint)


def strategy(name: str, budget: int) -> Strategy:
    made: dict[str, Any] = {
        "linear": Linear,
        OTHER_TOKENS: Linear,
        "linear_think": LinearThink,
        "sliding_window": lambda: SlidingWindow(budget),
        "clip_tool_results": lambda: ClipToolResults(budget, keep_chars=1, marker="~"),
        "memory": lambda: Memory(budget, max_summary_tokens=12),
        "self_clip": lambda: SelfClip(budget, max_answer_tokens=200, excerpt_chars=40),
        "hint": Hint,
    }
    found: Strategy = made[name]()
    return found


HINT = "Think of coral."
NOTES = "78"
MAX_TOKENS = 1_000_000
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>")


class Play:
    """One episode; what it found is in `counts`."""

    def __init__(self, subject: Subject, script: ScriptedConversation, strategy_name: str, budget: int = 1) -> None:
        self.counts = Counts()
        self.lengths: list[int] = []
        """Tokens of each prompt."""
        self._subject, self._script = subject, script
        self._reference = subject.reference
        self._name = f"{subject.template.name} {subject.kind} {script.name} {strategy_name}"
        self._checks = PromptChecks(subject, self._name, self.counts)
        self._strategy = RecordingStrategy(strategy(strategy_name, budget))
        self._spells_out = strategy_name == OTHER_TOKENS and subject.lossless
        self._parser = ScriptedParser()
        self._context = ContextManager(subject.renderer, self._parser, max_tokens=MAX_TOKENS, strategy=self._strategy)
        self._hint = HINT if strategy_name == "hint" else None
        self._view: tuple[Message, ...] = script.opening
        """What the next prompt shows, without a hint."""
        self._said: list[int] = []
        self._segments = 0

    def run(self) -> None:
        self.counts.add("conversations")
        try:
            self._context.begin(self._script.opening, self._script.tools, hint=self._hint)
        except ValueError as error:
            self._refused(self._seen(self._view), self._script.tools, error)
            return
        for turn in self._script.turns:
            self._check_prompt()
            reply = self._say(turn.reply, self._script.tools)
            if not self._observe(reply, turn.given) or not self._answer_questions():
                break
        else:
            self._check_prompt()
            self.counts.add("played")
        self._check_masks()

    def _seen(self, view: tuple[Message, ...]) -> tuple[Message, ...]:
        if self._hint is None:
            return view
        length = len(self._script.opening)
        return (*self._strategy.hinted(view[:length], self._hint), *view[length:])

    def _check_prompt(self) -> None:
        ids = list(self._context.prompt_ids)
        self.lengths.append(len(ids))
        appends = isinstance(self._strategy.arrangement, Append)
        self._checks.prompt(ids, self._seen(self._view), self._script.tools, appends=appends)

    def _refused(self, messages: Sequence[Message], tools: Tools, error: object) -> None:
        if self._reference.shows_all(messages, tools):
            self.counts.add("refused", f"{self._name}: {error}")
        else:
            self.counts.add("both_refuse")

    def _observe(self, reply: Message, given: tuple[Message, ...]) -> bool:
        self._view = (*self._view, reply, *given)
        self._strategy.measured = self._strategy.arrangement = None
        try:
            stopped = self._context.observe(given)
        except ValueError as error:
            self._refused(self._seen(self._view), self._script.tools, error)
            return False
        return self._arranged(stopped)

    def _arranged(self, stopped: str | None) -> bool:
        """Take over what the strategy shows now."""
        arrangement = self._strategy.arrangement
        if stopped is None:
            if isinstance(arrangement, Rewrite):
                self._view = arrangement.messages
            return True
        if stopped == "unrenderable":
            measured, tools = self._strategy.measured, self._strategy.tools_measured
            view = self._seen(self._view) if measured is None else self._seen(measured)
            shown_tools = self._script.tools if tools or measured is None else ()
            self._refused(view, shown_tools, self._context.problem)
        else:
            self.counts.add(f"stopped_{stopped}")
        return False

    def _answer_questions(self) -> bool:
        while (question := self._context.question) is not None:
            self._checks.question(list(self._context.prompt_ids), self._seen(question.messages))
            text = question.example if question.max_answer_tokens > 100 else NOTES
            self._say(Message("assistant", text, "llm"), None)
            if not self._arranged(self._context.stopped):
                return False
        return True

    def _say(self, reply: Message, tools: Tools | None) -> Message:
        """Record the reply; what a parser reads in it. Without `tools`, it answers a question of the strategy."""
        natural = None if tools is None else self._checks.natural_reply(reply, tools)
        ids = self._written(reply, natural)[: self._context.room]
        thought = self._checks.opened_thought(self._reference.decode(ids))
        if reply.reasoning is None and _EMPTY_THOUGHT.search(thought):
            reply = replace(reply, reasoning="")
        self._parser.reply = Reply("tool_calls" if reply.tool_calls else "final", reply, None)
        self._context.record_reply(ids, [-0.25] * len(ids), policy_version=0)
        self._said += ids
        segments = len(self._context.segments())
        if tools is not None:
            self._checks.reply(ids, natural)
            if segments > self._segments and self._checks.only_appended:
                self.counts.add("needless_splits", self._name)
        self._segments = segments
        return reply

    def _written(self, reply: Message, natural: str | None) -> list[int]:
        """What the policy samples: the template's own reply where `context` can write it."""
        try:
            ids = self._subject.renderer.reply(reply)
        except ValueError as error:
            self.counts.add("no_demonstration", f"{self._name}: {error}")
            stops = self._subject.renderer.stop_ids
            ids = self._reference.ids(reply.content if natural is None else natural)
            ids = ids if ids and ids[-1] in stops else [*ids, min(stops)]
        return self._reference.spelled_out(ids) if self._spells_out else ids

    def _check_masks(self) -> None:
        authors = self._subject.renderer.authors
        sampled: list[int] = []
        for segment in self._context.segments():
            tokens = segment.tokens
            by_policy = authors.has_behavior(tokens.authors)
            trained = loss_mask(tokens, authors)
            sampled += tokens.token_ids[trained & by_policy].tolist()
            if (trained & ~(response_mask(tokens, authors) & by_policy)).any():
                self.counts.add("trained_unsampled", self._name)
        if sampled != self._said:
            self.counts.add("not_trained_once", self._name)


def play_all(subject: Subject, scripts: Sequence[ScriptedConversation], strategies: Sequence[str]) -> Counts:
    """Each script with each strategy; budgets are such that a strategy acts late in the plain episode."""
    counts = Counts()
    for script in scripts:
        plain = Play(subject, script, "linear")
        plain.run()
        if "linear" in strategies:
            counts.update(plain.counts)
        lengths = plain.lengths or [2]
        for name in strategies:
            if name != "linear":
                play = Play(subject, script, name, _budget(name, lengths))
                play.run()
                counts.update(play.counts)
    return counts


def _budget(name: str, lengths: Sequence[int]) -> int:
    """Short of the plain episode's last prompt by what the strategy can save."""
    first, last = lengths[0], lengths[-1]
    return max(1, last - 2 if name in ("clip_tool_results", "memory") else (first + 3 * last) // 4)
