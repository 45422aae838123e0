"""A scripted conversation played through `ContextManager`, each prompt held against transformers' own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from context import ContextManager, Message, Reply, loss_mask, response_mask
from context.strategies import Append, Rewrite
from tests.fakes.conversations import ScriptedParser
from tests.fakes.recorded_strategies import RecordingStrategy, strategy
from tests.fakes.scripted_conversations import ScriptedConversation
from tests.fakes.template_reference import Tools
from tests.fakes.template_subjects import Subject

HINT = "Think of coral."
NOTES = "Pearl is 78."
MAX_TOKENS = 1_000_000
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>")


@dataclass
class Counts:
    counted: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    """The first case of each count that should be zero."""

    def add(self, name: str, example: str | None = None) -> None:
        self.counted[name] += 1
        if example is not None:
            self.examples.setdefault(name, example)

    def update(self, other: Counts) -> None:
        self.counted.update(other.counted)
        self.examples = {**other.examples, **self.examples}


class Play:
    """One episode; what it found is in `counts`."""

    def __init__(self, subject: Subject, script: ScriptedConversation, strategy_name: str, budget: int = 1) -> None:
        self.counts = Counts()
        self.lengths: list[int] = []
        """Tokens of each prompt."""
        self._subject, self._script = subject, script
        self._reference = subject.reference
        self._name = f"{subject.template.name} {subject.kind} {script.name} {strategy_name}"
        self._strategy = RecordingStrategy(strategy(strategy_name, budget))
        self._parser = ScriptedParser()
        self._context = ContextManager(subject.renderer, self._parser, max_tokens=MAX_TOKENS, strategy=self._strategy)
        self._hint = HINT if strategy_name == "hint" else None
        self._opening: tuple[Message, ...] = script.opening
        self._view: tuple[Message, ...] = script.opening
        """What the next prompt shows, without a hint."""
        self._ids: list[int] | None = None
        """All that was shown and sampled in the main segment; None: nothing yet."""
        self._is_sampled: list[bool] = []
        self._texts: set[str] = set()
        """That as text, replies as the template writes them. Some write a stop token only when nothing follows."""
        self._appended: str | None = None
        """The last prompt and reply, as the template writes them."""
        self._natural = True
        self._said: list[int] = []

    def run(self) -> None:
        self.counts.add("conversations")
        seen, tools = self._seen(self._view), self._script.tools
        try:
            self._context.begin(self._script.opening, self._script.tools, hint=self._hint)
        except ValueError as error:
            self._refused(seen, tools, error)
            return
        for turn in self._script.turns:
            if not self._answer_questions():
                return
            self._check_prompt(self._seen(self._view), self._script.tools, question=False)
            reply = self._say(turn.reply, self._script.tools, question=False)
            if not self._observe(reply, turn.given):
                break
        else:
            if self._answer_questions():
                self._check_prompt(self._seen(self._view), self._script.tools, question=False)
                self.counts.add("played")
        self._check_masks()

    def _seen(self, view: tuple[Message, ...]) -> tuple[Message, ...]:
        if self._hint is None:
            return view
        opening = self._strategy.hinted(view[: len(self._opening)], self._hint)
        return (*opening, *view[len(self._opening) :])

    def _text(self, messages: Sequence[Message], tools: Tools, *, prompted: bool = True) -> str | None:
        return self._reference.text(messages, tools, prompted=prompted)

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
            self._check_prompt(self._seen(question.messages), (), question=True)
            text = question.example if question.max_answer_tokens > 100 else NOTES
            self._say(Message("assistant", text, "llm"), (), question=True)
            if not self._arranged(self._context.stopped):
                return False
        return True

    def _say(self, reply: Message, tools: Tools, *, question: bool) -> Message:
        """Record the reply; what a parser reads in it."""
        natural = self._natural_reply(reply, tools, question=question)
        try:
            ids = self._subject.renderer.reply(reply)
        except ValueError as error:
            self.counts.add("no_demonstration", f"{self._name}: {error}")
            ids = self._fallback(reply, natural)
        ids = ids[: self._context.room]
        said = self._reference.decode(ids)
        if reply.reasoning is None and _EMPTY_THOUGHT.search((self._prompt_text or "")[-20:] + said):
            reply = replace(reply, reasoning="")
        self._parser.reply = Reply("tool_calls" if reply.tool_calls else "final", reply, None)
        self._context.record_reply(ids, [-0.25] * len(ids), policy_version=0)
        self._said += ids
        if question or self._ids is None:
            return reply
        self._ids += ids
        self._is_sampled += [True] * len(ids)
        stop = self._reference.controls.get(ids[-1], "")
        if natural is None or (self._subject.lossless and said not in (natural, natural + stop)):
            self._natural = False
        bodies = {said} if natural is None else {natural, natural + stop, natural.removesuffix(stop)}
        self._texts = {text + body for text in self._texts for body in bodies}
        return reply

    def _natural_reply(self, reply: Message, tools: Tools, *, question: bool) -> str | None:
        """What the template has the policy write, with the stop token if it writes one."""
        before = self._prompt_text
        whole = None if question else self._text((*self._prompt_shown, reply), tools, prompted=False)
        self._appended = None
        if before is None or whole is None or not whole.startswith(before):
            return None
        body = whole[len(before) :]
        stops = [self._reference.controls.get(token, "") for token in self._subject.renderer.stop_ids]
        ends = [body.find(stop) + len(stop) for stop in stops if stop and stop in body]
        body = body[: min(ends)] if ends else body
        self._appended = before + body
        return body

    def _fallback(self, reply: Message, natural: str | None) -> list[int]:
        stops = self._subject.renderer.stop_ids
        ids = self._reference.ids(reply.content if natural is None else natural)
        return ids if ids and ids[-1] in stops else [*ids, min(stops)]

    def _check_prompt(self, messages: tuple[Message, ...], tools: Tools, *, question: bool) -> None:
        ids = list(self._context.prompt_ids)
        text = self._text(messages, tools)
        self.lengths.append(len(ids))
        self._prompt_text, self._prompt_shown = text, messages
        if text is None:
            self.counts.add("only_ours")
            text = self._reference.decode(ids)
        self.counts.add("prompts")
        expected = self._reference.ids(text)
        clean = not self._reference.spells_control(messages, tools)
        before = None if question else self._ids
        if before is not None and ids[: len(before)] == before:
            self._check_continued(ids, text, expected, clean=clean)
        else:
            if before is not None and isinstance(self._strategy.arrangement, Append):
                self.counts.add("splits")
                if self._appended is not None and text.startswith(self._appended) and self._natural:
                    self.counts.add("needless_splits", self._name)
            self._check_first(ids, text, expected, clean=clean)
            if not question:
                self._texts, self._natural = {text}, True
                self._is_sampled = [False] * len(ids)
        if not question:
            self._ids = ids

    def _check_first(self, ids: list[int], text: str, expected: list[int], *, clean: bool) -> None:
        wanted = text if self._subject.lossless else self._reads(expected)
        if (clean or self._subject.lossless) and self._reads(ids) != wanted:
            self.counts.add("wrong_text", f"{self._name}: first prompt {self._difference(ids, text)}")
        if not clean:
            return
        self.counts.add("first_prompts")
        if ids == expected:
            self.counts.add("first_equal")
        else:
            self.counts.add("first_unequal", f"{self._name}: {self._token_difference(ids, expected)}")

    def _check_continued(self, ids: list[int], text: str, expected: list[int], *, clean: bool) -> None:
        assert self._ids is not None
        added = ids[len(self._ids) :]
        self._is_sampled += [False] * len(added)
        self.counts.add("continued")
        if self._subject.lossless:
            more = self._reference.decode(added)
            right = any(before + more == text for before in self._texts)
        else:
            right = not self._natural or not clean or self._reads(ids) == self._reads(expected)
        self._texts = {text}
        if not right:
            self.counts.add("wrong_text", f"{self._name}: {self._difference(ids, text)}")
        elif clean and self._natural:
            self._check_parts(ids, expected)

    def _check_parts(self, ids: list[int], expected: list[int]) -> None:
        ours, theirs = self._parts(ids, self._is_sampled), self._parts(expected, [False] * len(expected))
        if [control for control, *_ in ours] != [control for control, *_ in theirs]:
            self.counts.add("unaligned", f"{self._name}: {self._token_difference(ids, expected)}")
            return
        for (_, part, is_sampled), (_, wanted, _) in zip(ours, theirs, strict=True):
            if part == wanted:
                continue
            if is_sampled:
                self.counts.add("borders")
            else:
                self.counts.add("parts_unequal", f"{self._name}: {self._token_difference(part, wanted)}")

    def _parts(self, ids: list[int], is_sampled: list[bool]) -> list[tuple[int | None, list[int], bool]]:
        """Control token, the tokens up to the next one, and whether one of them was sampled."""
        found: list[tuple[int | None, list[int], bool]] = [(None, [], False)]
        for token, said in zip(ids, is_sampled, strict=True):
            if token in self._reference.controls:
                found.append((token, [], False))
            else:
                control, part, before = found[-1]
                part.append(token)
                found[-1] = control, part, before or said
        return found

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

    def _reads(self, ids: Sequence[int]) -> str:
        text = self._reference.decode(ids)
        return text if self._subject.lossless else "".join(text.split())

    def _difference(self, ids: list[int], text: str) -> str:
        ours = self._reference.decode(ids)
        at = next((i for i, (a, b) in enumerate(zip(ours, text, strict=False)) if a != b), min(len(ours), len(text)))
        return f"{ours[max(0, at - 20) : at + 20]!r} for {text[max(0, at - 20) : at + 20]!r}"

    def _token_difference(self, ids: list[int], expected: list[int]) -> str:
        at = next((i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), 0)
        spelled = [
            [self._reference.spelled(token) for token in row[max(0, at - 3) : at + 3]] for row in (ids, expected)
        ]
        return f"{spelled[0]} for {spelled[1]}"


def play_all(subject: Subject, scripts: Sequence[ScriptedConversation], strategies: Sequence[str]) -> Counts:
    """Each script with each strategy; budgets of strategies lie halfway through the plain episode."""
    counts = Counts()
    for script in scripts:
        plain = Play(subject, script, "linear")
        plain.run()
        if "linear" in strategies:
            counts.update(plain.counts)
        lengths = plain.lengths or [2]
        for name in strategies:
            if name != "linear":
                play = Play(subject, script, name, max(1, (lengths[0] + lengths[-1]) // 2))
                play.run()
                counts.update(play.counts)
    return counts
