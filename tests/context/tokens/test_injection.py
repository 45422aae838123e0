"""Whatever users, tools and files write, no control token comes of it: spelled in every content, in every disguise."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from context import Message, TokenCodec, ToolCall
from tests.fakes.families import CORPUS, family
from tests.fakes.real_templates import KINDS, REPRESENTATIVE, SIX, TEMPLATES, real_template, real_templates, renderer
from tests.fakes.template_reference import Subject, subject
from tests.fakes.tokenizer_kinds import tokenizer_kinds

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
CASES = [
    *((name, kind, 40, 10) for name in SIX for kind in KINDS),
    # Templates that put their control tokens together.
    *((name, "byte_bpe", 4, None) for name in ("written/concatenates", "written/brackets")),
    *(pytest.param(row.name, "byte_bpe", 2, None, marks=pytest.mark.soak) for row in real_templates()),
    *(
        pytest.param(name, kind, 2, None, marks=pytest.mark.soak)
        for name in REPRESENTATIVE
        for kind in tokenizer_kinds()
        if kind != "byte_bpe"
    ),
]


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


@pytest.mark.parametrize(("name", "kind", "every", "most"), CASES)
def test_no_added_token_comes_of_any_content(name: str, kind: str, every: int, most: int | None) -> None:
    assert ways_in(InjectionCase(subject(real_template(name), kind)), every=every, most=most) == {}


@pytest.mark.parametrize("name", SIX)
def test_token_that_a_template_looks_for_in_a_reply_is_text_there_or_refused(name: str) -> None:
    case = InjectionCase(subject(real_template(name), "byte_bpe"))
    harmless = case.controls({})
    for token in (token for token in case.tokens() if any(part in token for part in BRANCHING)):
        for field in ("assistant", "reasoning"):
            try:
                extra = case.controls({field: f"a {token} b"}) - harmless
            except ValueError:
                continue
            assert not extra, (field, token)


@pytest.mark.parametrize("name", TEMPLATES)
def test_names_that_spell_a_control_token_are_refused_everywhere(name: str) -> None:
    made = renderer(name)
    user = Message("user", "x")
    for token in made.codec.added_tokens:
        call = Message("assistant", "", "initialization", (ToolCall(token, {}),))
        call_id = Message("assistant", "", "initialization", (ToolCall("lookup", {}, token),))
        for bad in (call, call_id, Message(token, "x"), Message("tool", "x", "env", name=token)):
            with pytest.raises(ValueError, match="must match"):
                made.initial([user, bad], ())
        with pytest.raises(ValueError, match="must match"):
            made.initial([user], [{"type": "function", "function": {"name": token}}])


def test_control_id_from_content_is_an_error_in_production(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = TokenCodec(family("chatml").tokenizer.to_str())
    mark = codec.encode_text("?")  # what stands in for characters that would be control tokens
    monkeypatch.setattr(codec, "added_ids", frozenset(mark))
    with pytest.raises(ValueError, match=f"must not write control tokens from content, got id {mark[0]} "):
        codec.encode_text("a?")


def test_merges_that_spell_an_added_token_are_no_way_in() -> None:
    # Converted SentencePiece files hold merges for every piece, control pieces among them.
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(special_tokens=["<unk>"], show_progress=False))
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False)])
    description = json.loads(tokenizer.to_str())
    vocabulary = description["model"]["vocab"]
    vocabulary.setdefault("s>", len(vocabulary) + 1)
    vocabulary["<s>"] = tokenizer.token_to_id("<s>")
    description["model"]["merges"] = [["s", ">"], ["<", "s>"], *description["model"]["merges"]]
    codec = TokenCodec(json.dumps(description))
    assert codec.encode("<s>") == [codec.token_id("<s>")]
    assert codec.token_id("<s>") not in codec.encode_text("<s>")


def test_word_of_the_vocabulary_that_is_a_control_token_too_is_text_of_other_tokens() -> None:
    # Llama 3's tokenizer looks words up whole, ahead of all merges.
    tokenizer = Tokenizer.from_str(family("llama3").tokenizer.to_str())
    control = tokenizer.token_to_id("pearl")
    tokenizer.add_tokens([AddedToken("pearl", normalized=False)])
    codec = TokenCodec(tokenizer.to_str())
    assert codec.encode("pearl") == [control]
    ids = codec.encode_text("pearl")
    assert control not in ids and codec.decode(ids) == "pearl"


def test_added_white_space_is_text_and_keeps_its_id() -> None:
    # GPT-NeoX has runs of spaces as added tokens behind its vocabulary.
    tokenizer = Tokenizer.from_str(family("llama3").tokenizer.to_str())
    tokenizer.add_tokens([AddedToken("    ", normalized=False)])
    codec = TokenCodec(tokenizer.to_str())
    spaces = tokenizer.token_to_id("    ")
    assert spaces not in codec.added_ids
    assert spaces in codec.encode_text("a    b")
    assert codec.added_ids.isdisjoint(codec.encode_text("    <|eot_id|>"))


def test_piece_gets_no_prefix_space_bos_padding_or_truncation() -> None:
    tokenizer = Tokenizer.from_str(family("mistral").tokenizer.to_str())
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    codec = TokenCodec(tokenizer.to_str())
    assert codec.decode(codec.encode_text("code of pearl and more of it")) == "code of pearl and more of it"
    assert codec.encode_text("x") == [tokenizer.token_to_id("x")]
