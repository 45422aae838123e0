"""Control tokens spelled in every content that people, tools and files can write, in every disguise, and what comes of
them in a prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from context import Message, ToolCall
from tests.fakes.template_reference import Subject

HARMLESS = "x"
FIELDS = (
    *("system", "user", "note", "reasoning", "assistant", "argument_key", "argument_value", "tool_name"),
    *("tool_result", "description", "property"),
)
"""In the order of the conversation: neighbours stand side by side in a prompt, or nearly so."""
INVISIBLE = tuple("\u200b\u200d\u2060\ufeff\u00ad\x00\x7f\ue000\uf8e0\uf8ff\ufdd0\uffff\U000f0000\U000e0001\U0010ffff")
"""What text may hold unseen, and what a program may mark it with."""
BRANCHING = ("think", "channel", "tool_response", "THINK")
"""Parts of tokens that templates look for in what assistants say, and then write other tokens of their own."""
_SMALL = str.maketrans({"<": "\ufe64", ">": "\ufe65", "|": "\uff5c"})
_ESCAPED = str.maketrans({char: f"\\u{ord(char):04x}" for char in "<>[]|"})


def disguises(token: str) -> list[str]:
    """Texts that spell the token, or would after some normalising, unescaping or cleaning."""
    half = len(token) // 2
    wide = "".join(chr(ord(char) + 0xFEE0) if "!" <= char <= "~" else char for char in token)
    found = [
        token,
        f"a {token} b",
        token * 2,
        f"  {token}    \n\n{token}\t\t",
        wide,
        token.translate(_SMALL),
        token.translate(_ESCAPED),
        token.upper(),
        token[1:],
        token[:-1],
        token[:half] + token + token[half:],
        *(token[:half] + mark + token[half:] for mark in INVISIBLE),
        *(f"{token}{mark}{token[:half]}{mark}{token[half:]}" for mark in INVISIBLE[7:9]),
    ]
    return [text for text in found if text]


def split_over_neighbours(token: str) -> Iterator[Mapping[str, str]]:
    """The token's two halves at the end of one content and the beginning of the next."""
    for cut in {1, len(token) // 2, len(token) - 1} - {0, len(token)}:
        for first, second in pairwise((*FIELDS, FIELDS[0])):
            yield {first: HARMLESS + token[:cut], second: token[cut:] + HARMLESS}
            yield {first: token[:cut], second: token[cut:]}


def injected(fields: Mapping[str, str], *, system: bool, calls: bool) -> tuple[list[Message], list[dict[str, Any]]]:
    """A conversation and its tools with these contents, harmless where none is given."""
    text = {**dict.fromkeys(FIELDS, HARMLESS), "tool_name": "lookup", **fields}
    call = ToolCall(text["tool_name"], {text["argument_key"]: text["argument_value"]}, "call00001")
    messages = [Message("system", text["system"], "initialization")] if system else []
    messages += [
        Message("user", text["user"], note=text["note"]),
        Message("assistant", text["assistant"], "initialization", reasoning=text["reasoning"]),
        Message("user", HARMLESS),
    ]
    if calls:
        called = Message("assistant", "", "initialization", (call,), reasoning=text["reasoning"])
        result = Message("tool", text["tool_result"], "env", name=text["tool_name"], tool_call_id="call00001")
        messages += [called, result]
    properties = {text["property"]: {"type": "string", "description": text["description"]}}
    function = {
        "name": text["tool_name"],
        "description": text["description"],
        "parameters": {"type": "object", "properties": properties, "required": [text["property"]]},
    }
    return messages, [{"type": "function", "function": function}]


class InjectionCase:
    """One template with one tokenizer, and the control tokens that its prompt has with harmless contents."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        shapes = [(system, calls) for calls in (True, False) for system in (True, False)]
        self._shape = next(shape for shape in shapes if self._renders(*shape))
        # Some control tokens count only as words of their own: not beside a letter, but beside a bracket.
        self._harmless = self.controls({}) | self.controls({"system": "()", "user": "()"})

    def _renders(self, system: bool, calls: bool) -> bool:
        messages, tools = injected({}, system=system, calls=calls)
        if self.subject.reference.text(messages, tools) is None:
            return False
        try:
            self.subject.renderer.initial(messages, tools)
        except ValueError:
            return False
        return True

    def controls(self, fields: Mapping[str, str]) -> Counter[str]:
        """Control tokens of the prompt, by spelling. ValueError: refused."""
        return self._known(self._prompt(fields))

    def found(self, fields: Mapping[str, str]) -> str | None:
        """What is wrong with a prompt of these contents; None: nothing is."""
        try:
            ids = self._prompt(fields)
        except ValueError as error:
            return None if "tool_name" in fields else f"refused: {error}"
        extra = self._known(ids) - self._harmless
        if extra:
            return f"control tokens {dict(extra)}"
        if self.subject.lossless:
            text = self.subject.reference.text(*self._given(fields))
            if text is not None and self.subject.reference.decode(ids) != text:
                return "another text than the template's"
        return None

    def _given(self, fields: Mapping[str, str]) -> tuple[list[Message], list[dict[str, Any]]]:
        return injected(fields, system=self._shape[0], calls=self._shape[1])

    def _prompt(self, fields: Mapping[str, str]) -> list[int]:
        found: list[int] = self.subject.renderer.initial(*self._given(fields)).token_ids.tolist()
        return found

    def _known(self, ids: list[int]) -> Counter[str]:
        known = self.subject.reference.controls
        return Counter(known[token] for token in ids if token in known)

    def tokens(self) -> list[str]:
        return list(self.subject.reference.controls.values())


def branches(field: str, token: str) -> bool:
    """Whether the template may answer to the token with tokens of its own."""
    return field in ("assistant", "reasoning") and any(part in token for part in BRANCHING)


def attempts(token: str, *, every: int = 1, first: int = 0) -> Iterator[Mapping[str, str]]:
    """The token in each field, plain; and of its disguises and halves every so many, from the `first` on."""
    plain = disguises(token)[:2]
    fields = [field for field in FIELDS if not branches(field, token)]
    yield from ({field: text} for field in fields for text in plain)
    hidden = [{field: text} for field in fields for text in disguises(token)[2:]]
    halves = [case for case in split_over_neighbours(token) if not any(branches(field, token) for field in case)]
    yield from [*hidden, *halves][first % every :: every]


def ways_in(case: InjectionCase, *, every: int = 1, most: int | None = None) -> dict[str, str]:
    """Field -> the first attempt that came to anything there, and what it came to. `most`: of so many tokens."""
    found: dict[str, str] = {}
    for place, token in enumerate(case.tokens()[:most]):
        for fields in attempts(token, every=every, first=place):
            field = "+".join(fields)
            if field not in found and (problem := case.found(fields)) is not None:
                found[field] = f"{dict(fields)!r}: {problem}"
    return found
