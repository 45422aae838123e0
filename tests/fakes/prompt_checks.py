"""Prompts of one episode, each held against transformers' rendering of the messages that it shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from context import Message
from tests.fakes.template_reference import Subject, Tools


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


class PromptChecks:
    """What stands in the main segment so far, and what its next prompt must be.

    Sampled replies stay as they are: a prompt is right if it is the template's text once each of them is replaced by
    what the template writes for it.
    """

    def __init__(self, subject: Subject, name: str, counts: Counts) -> None:
        self._subject, self._reference = subject, subject.reference
        self._name, self._counts = name, counts
        self._ids: list[int] | None = None
        """All that was shown and sampled; None: nothing yet."""
        self._is_sampled: list[bool] = []
        self._texts: set[str] = set()
        """That as text, replies as the template writes them. Some write a stop token only when nothing follows."""
        self._prompt: tuple[tuple[Message, ...], str | None] = (), None
        """The last prompt's messages and rendering."""
        self._appended: str | None = None
        """The last prompt and its reply, as the template writes them; None: it does not begin replies as it asks."""
        self._natural = True
        """Every reply of the segment is what the template has the policy write."""
        self._stop = ""
        """The last reply's stop token, where the template writes none there."""
        self._ended_otherwise = False
        """A reply ended in a stop token that the template leaves out, or writes only when nothing follows."""

        self.only_appended = False
        """The last prompt is the one before, its reply and what follows, for the template and for the strategy."""

    def opened_thought(self, said: str) -> str:
        """The reply with the end of what asked for it."""
        return (self._prompt[1] or "")[-20:] + said

    def natural_reply(self, reply: Message, tools: Tools) -> str | None:
        """What the template has the policy write, with the stop token if it writes one."""
        messages, before = self._prompt
        whole = self._reference.text((*messages, reply), tools, prompted=False)
        self._appended = None
        if before is None or whole is None or not whole.startswith(before):
            return None
        body = whole[len(before) :]
        stops = [self._reference.controls.get(token, "") for token in self._subject.renderer.stop_ids]
        ends = [body.find(stop) + len(stop) for stop in stops if stop and stop in body]
        body = body[: min(ends)] if ends else body
        self._appended = before + body
        return body

    def reply(self, ids: list[int], natural: str | None) -> None:
        """Take over a sampled reply of the main segment."""
        assert self._ids is not None
        self._ids += ids
        self._is_sampled += [True] * len(ids)
        said, stop = self._reference.decode(ids), self._reference.controls.get(ids[-1], "")
        if natural is None:
            self._natural, bodies = False, {said}
        else:
            spelled = [self._reads(self._reference.ids(text)) for text in (natural, natural + stop)]
            self._natural &= self._reads(ids) in spelled
            self._stop = "" if natural.endswith(stop) else stop
            bodies = {natural, natural + stop, natural.removesuffix(stop)}
        self._texts = {text + body for text in self._texts for body in bodies}

    def question(self, ids: list[int], messages: tuple[Message, ...]) -> None:
        """Check the prompt of a strategy's question, which has a segment of its own."""
        text = self._rendered(ids, messages, ())
        clean = not self._reference.spells_control(messages, ())
        self._check_first(ids, text, self._reference.ids(text), clean=clean)

    def prompt(self, ids: list[int], messages: tuple[Message, ...], tools: Tools, *, appends: bool) -> None:
        """Check the next prompt. `appends`: the strategy changed nothing."""
        text = self._rendered(ids, messages, tools)
        expected = self._reference.ids(text)
        clean = not self._reference.spells_control(messages, tools)
        before = self._ids
        appended = self._appended is not None and self._natural and text.startswith(self._appended)
        self.only_appended = appends and before is not None and appended
        if before is not None and ids[: len(before)] == before:
            self._check_continued(ids, text, expected, clean=clean)
        else:
            if before is not None and appends:
                self._counts.add("splits")
            self._check_first(ids, text, expected, clean=clean)
            self._texts, self._natural, self._ended_otherwise = {text}, True, False
            self._is_sampled = [False] * len(ids)
        self._ids = ids

    def _rendered(self, ids: list[int], messages: tuple[Message, ...], tools: Tools) -> str:
        text = self._reference.text(messages, tools)
        self._prompt = messages, text
        self._counts.add("prompts")
        if text is None:
            self._counts.add("only_ours", self._name)
            return self._reference.decode(ids)
        return text

    def _check_first(self, ids: list[int], text: str, expected: list[int], *, clean: bool) -> None:
        wanted = text if self._subject.lossless else self._reads(expected)
        if (clean or self._subject.lossless) and self._reads(ids) != wanted:
            self._counts.add("wrong_text", f"{self._name}: first prompt {self._difference(ids, text)}")
        if not clean:
            return
        self._counts.add("first_prompts")
        if ids == expected:
            self._counts.add("first_equal")
        else:
            self._counts.add("first_unequal", f"{self._name}: {self._token_difference(ids, expected)}")

    def _check_continued(self, ids: list[int], text: str, expected: list[int], *, clean: bool) -> None:
        assert self._ids is not None
        added = ids[len(self._ids) :]
        self._is_sampled += [False] * len(added)
        self._counts.add("continued")
        if self._appended is not None:
            self._ended_otherwise |= not text.startswith(self._appended + self._stop)
        if self._subject.lossless:
            more = self._reference.decode(added)
            right = any(before + more == text for before in self._texts)
        else:
            comparable = self._natural and clean and not self._ended_otherwise
            right = not comparable or self._reads(ids) == self._reads(expected)
        self._texts = {text}
        if not right:
            self._counts.add("wrong_text", f"{self._name}: {self._difference(ids, text)}")
        elif clean and self._natural:
            self._check_parts(ids, expected)

    def _check_parts(self, ids: list[int], expected: list[int]) -> None:
        ours, theirs = self._parts(ids, self._is_sampled), self._parts(expected, [False] * len(expected))
        if [control for control, *_ in ours] != [control for control, *_ in theirs]:
            if not self._ended_otherwise:
                self._counts.add("unaligned", f"{self._name}: {self._token_difference(ids, expected)}")
            return
        self._counts.add("compared_by_parts")
        for (_, part, is_sampled), (_, wanted, _) in zip(ours, theirs, strict=True):
            if part == wanted:
                continue
            if is_sampled:
                self._counts.add("borders")
            else:
                self._counts.add("parts_unequal", f"{self._name}: {self._token_difference(part, wanted)}")

    def _parts(self, ids: list[int], is_sampled: list[bool]) -> list[tuple[int | None, list[int], bool]]:
        """Control token, the tokens up to the next one, and whether one of them, or the next one, was sampled.

        A control token may take up the white space before it, which nobody knows before it is sampled.
        """
        found: list[tuple[int | None, list[int], bool]] = [(None, [], False)]
        for token, said in zip(ids, is_sampled, strict=True):
            if token in self._reference.controls:
                control, part, before = found[-1]
                found[-1] = control, part, before or said
                found.append((token, [], False))
            else:
                control, part, before = found[-1]
                part.append(token)
                found[-1] = control, part, before or said
        return found

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
