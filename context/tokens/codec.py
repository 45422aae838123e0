"""Turns text into token ids and back. A template's text may hold control tokens; a content is always plain text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from context.wording import storable

_STAND_IN = "?"
_SENTENCEPIECE_SPACE = "\u2581"
_OTHER = "[other]"


_Description = dict[str, Any]


@dataclass(frozen=True)
class Span:
    """The characters of a text from `start` to before `end`."""

    start: int
    end: int

    def cut_from(self, text: str) -> str:
        return text[self.start : self.end]

    def moved(self, by: int) -> Self:
        return replace(self, start=self.start + by, end=self.end + by)

    def overlaps(self, other: Span) -> bool:
        return self.start < other.end and other.start < self.end

    def without_space(self, text: str) -> Span:
        """The span without the white space at its ends."""
        spelled = self.cut_from(text)
        start = self.start + len(spelled) - len(spelled.lstrip())
        return Span(start, start + len(spelled.strip()))


@dataclass(frozen=True)
class Control:
    """A control token in a text."""

    token: int
    place: Span
    """Its characters, with the white space that the token takes up."""


@dataclass(frozen=True)
class Piece:
    """The tokens of a text."""

    ids: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    """The character at which each token begins. The numbers never fall."""

    def find_token(self, character: int) -> int:
        """Find the first token that begins at the character or after it."""
        return int(self.starts.searchsorted(np.int32(character))) if character > 0 else 0


class TokenCodec:
    """A tokenizer file with its control tokens kept apart.

    Control tokens are the tokenizer's added tokens, special or not, except for tokens that stand for plain text: runs
    of white space, the unknown token, single letters.
    """

    def __init__(self, tokenizer_json: str, *, special: Iterable[str] = ()) -> None:
        """`special`: tokens that the model names (bos, eos, pad). They are never plain text."""
        given = json.loads(tokenizer_json)
        if not isinstance(given["model"]["vocab"], dict):
            raise ValueError(
                f"tokenizer must number the words of its vocabulary, as BPE does, got {given['model'].get('type')}. "
                "Use another model."
            )
        description = _whole_text_rules_off(given)
        control = _control_tokens(description, frozenset(special))
        self.hash = hashlib.sha256(tokenizer_json.encode()).hexdigest()
        self.added_ids = frozenset(int(row["id"]) for row in control)
        """Ids that only a template or the policy may write."""
        self.added_tokens = tuple(str(row["content"]) for row in control)
        if letters := [text for text in self.added_tokens if len(text) == 1]:
            raise ValueError(
                f"tokenizer must have control tokens of at least two characters, got {letters[0]!r}. "
                "This tokenizer can't be used safely."
            )
        self._drops_first_space = _word_decoder(given).decode([0]) == "x"
        self._full = _tokenizer_of(description)
        self._text = _without_control_tokens(description, self.added_ids)
        # Some tokenizers put a space in front of a text's first word. None belongs there if another text comes before.
        inside = _each_part(description, "pre_tokenizer", "pretokenizers", _behind_the_first)
        self._full_inside = self._full if inside == description else _tokenizer_of(inside)
        self._text_inside = self._text if inside == description else _without_control_tokens(inside, self.added_ids)
        self._control_ids = [int(row["id"]) for row in control]
        self._finder = _only_control_tokens(description, control)
        self.vocab_size: int = self._full.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The ids of a trusted text that follows another one. Control tokens are recognised."""
        ids: list[int] = self._full_inside.encode(text, add_special_tokens=False).ids
        return ids

    def encode_text(self, text: str) -> list[int]:
        """The ids of an untrusted text that follows another one: all plain. Lone surrogates become U+FFFD."""
        return list(self._untrusted(storable(text), opens=False).ids)

    def controls(self, text: str) -> list[Control]:
        """The control tokens that the tokenizer recognises in a text."""
        encoding = _encoded(self._finder, text)
        found = zip(encoding.ids, encoding.offsets, strict=True)
        return [Control(self._control_ids[number - 1], Span(*place)) for number, place in found if number]

    def piece(self, text: str, control: Control | None, *, opens: bool) -> Piece:
        """The tokens of a text that may begin with `control`. Whatever the text spells, there is no
        other control token.

        They are the tokenizer's own tokens for this text. If these would contain another control token, a tokenizer
        without control tokens makes them. `opens`: nothing comes before the text.
        """
        tokenizer = self._full if opens or control else self._full_inside
        encoding = _encoded(tokenizer, text)
        ids = encoding.ids  # each access makes a new list
        found = [place for place, token in enumerate(ids) if token in self.added_ids]
        if [ids[place] for place in found] == ([control.token] if control else []):
            # The space that a tokenizer puts in front of a text stands before the control token.
            skipped = found[0] if control and not opens else 0
            return Piece(np.array(ids[skipped:], np.int32), _starts(encoding)[skipped:])
        head = [] if control is None else [control.token]
        cut = 0 if control is None else control.place.end
        encoding = self._untrusted(text[cut:], opens=opens and control is None)
        starts = np.concatenate([np.zeros(len(head), np.int32), _starts(encoding) + np.int32(cut)])
        return Piece(np.array([*head, *encoding.ids], np.int32), starts)

    def _untrusted(self, text: str, *, opens: bool) -> Encoding:
        tokenizer = self._text if opens else self._text_inside
        encoding = _encoded(tokenizer, text)
        found = [place for token, place in zip(encoding.ids, encoding.offsets, strict=True) if token in self.added_ids]
        if found:  # the unknown token is a control token too: the characters that it stands for become others
            characters = list(text)
            for first, end in found:
                characters[first:end] = _STAND_IN * (end - first)
            encoding = tokenizer.encode("".join(characters), add_special_tokens=False)
            token = next((token for token in encoding.ids if token in self.added_ids), None)
            if token is not None:
                raise ValueError(
                    f"tokenizer must not write control tokens from content, got id {token} "
                    f"({self._full.id_to_token(token)!r}). This tokenizer can't be used safely."
                )
        return encoding

    def decode(self, ids: Sequence[int], *, opens: bool = False) -> str:
        """The text for people and parsers, with control tokens visible and unknown ids left out.

        `opens`: nothing comes before the text.
        """
        text = str(self._full.decode(list(ids), skip_special_tokens=False))
        return text.removeprefix(" ") if opens and self._drops_first_space else text

    def token_id(self, token: str) -> int | None:
        found: int | None = self._full.token_to_id(token)
        return found


def _encoded(tokenizer: Tokenizer, text: str) -> Encoding:
    """Encode a text while other threads continue: 500,000 characters take a second."""
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def _starts(encoding: Encoding) -> npt.NDArray[np.int32]:
    # A token that stands for no character of the text begins where the token before it does.
    return np.maximum.accumulate(np.array([first for first, _ in encoding.offsets], np.int32))


def _whole_text_rules_off(description: _Description) -> _Description:
    """The tokenizer without rules for whole texts: special tokens around them, truncation, padding, dropout, strips."""
    found = {**description, "truncation": None, "padding": None, "post_processor": None}
    found["model"] = {**found["model"]}
    if found["model"].get("dropout") is not None:
        found["model"]["dropout"] = None
    return _each_part(found, "decoder", "decoders", _without_first_space)


def _control_tokens(description: _Description, special: Collection[str]) -> list[dict[str, Any]]:
    """The added tokens, special or not, except for tokens that stand for plain text.

    Plain text is white space, the unknown token, and a single character that is not special. A token in `special`,
    which the model names, is always a control token.
    """
    unknown = description["model"].get("unk_token")
    rows = []
    for row in description["added_tokens"]:
        content = str(row["content"])
        blank = content.replace(_SENTENCEPIECE_SPACE, " ").isspace()
        letter = len(content) == 1 and not row.get("special")
        if content in special or not (blank or letter or content == unknown):
            rows.append(row)
    return rows


def _without_control_tokens(description: _Description, control: Collection[int]) -> Tokenizer:
    """The tokenizer without its control tokens: they are no added tokens, vocabulary entries or merge results.

    Text could otherwise produce them: merges can spell them, and `ignore_merges` looks up whole words.
    """
    model = dict(description["model"])
    plain = [row for row in description["added_tokens"] if row["id"] not in control]
    removed = {token for token, token_id in model["vocab"].items() if token_id in control}
    model["vocab"] = {token: i for token, i in model["vocab"].items() if token not in removed}
    # An added token outside the vocabulary would get another number. As an entry it keeps its id.
    model["vocab"].update({row["content"]: row["id"] for row in plain})
    if removed and "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if removed.isdisjoint(_mentioned(pair))]
    return _tokenizer_of({**description, "added_tokens": plain, "model": model})


def _only_control_tokens(description: _Description, control: Sequence[Mapping[str, Any]]) -> Tokenizer:
    """A tokenizer that numbers these control tokens from 1, and reads any text between two of them as one word."""
    model = {"type": "WordLevel", "vocab": {_OTHER: 0}, "unk_token": _OTHER}
    added = [{**row, "id": number} for number, row in enumerate(control, 1)]
    return _tokenizer_of({**description, "model": model, "added_tokens": added, "pre_tokenizer": None, "decoder": None})


def _word_decoder(description: _Description) -> Tokenizer:
    """Make a tokenizer whose only word is SentencePiece's `x`, with the decoder of the described tokenizer."""
    parts = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "truncation", "padding"))
    word = f"{_SENTENCEPIECE_SPACE}x"
    model = {"type": "WordLevel", "vocab": {word: 0}, "unk_token": word}
    return _tokenizer_of({**description, **parts, "added_tokens": [], "model": model})


def _each_part(description: _Description, kind: str, parts: str, change: Any) -> _Description:
    component = description.get(kind)
    if component is None:
        return description
    rows = component[parts] if component["type"] == "Sequence" else [component]
    kept = [row for row in map(change, rows) if row is not None]
    return {**description, kind: {"type": "Sequence", parts: kept} if kept else None}


def _without_first_space(decoder: dict[str, Any]) -> dict[str, Any] | None:
    """Remove the rule that drops a text's first space, because here the space is inside a text."""
    if decoder["type"] == "Strip" and decoder.get("content") == " ":
        return None
    return _never_first(decoder)


def _behind_the_first(component: dict[str, Any]) -> dict[str, Any]:
    return _never_first(component) if component.get("prepend_scheme") == "first" else component


def _never_first(component: dict[str, Any]) -> dict[str, Any]:
    if component["type"] == "Metaspace":
        rest = {key: value for key, value in component.items() if key != "add_prefix_space"}
        return {**rest, "prepend_scheme": "never"}
    return {**component, "add_prefix_space": False} if "add_prefix_space" in component else component


def _tokenizer_of(description: _Description) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(description))


def _mentioned(merge: str | Sequence[str]) -> tuple[str, str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right
