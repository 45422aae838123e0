"""Text to token ids and back: trusted template text one way, untrusted content another."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_SENTENCEPIECE_SPACE = "\u2581"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}
"""How byte-level tokenizers (GPT-2 and its heirs) spell bytes that are no printable character."""


class TokenCodec:
    """A tokenizer file with its control tokens kept apart.

    Control tokens are the tokenizer's added tokens, special or not, except those that stand for plain text:
    runs of white space and the unknown token. Pieces are encoded as they stand inside a longer text: no BOS,
    no prefix space, no truncation, no padding.
    """

    def __init__(self, tokenizer_json: str) -> None:
        description = json.loads(tokenizer_json)
        _only_pieces(description)
        control = [row for row in description["added_tokens"] if not _is_plain_text(row, description["model"])]
        self.hash = hashlib.sha256(tokenizer_json.encode()).hexdigest()
        self.added_ids = frozenset(int(row["id"]) for row in control)
        """Ids that only a template or the policy may write."""
        self.added_tokens = tuple(str(row["content"]) for row in control)
        self._byte_level = '"ByteLevel"' in json.dumps(description.get("decoder"))
        self._template = Tokenizer.from_str(json.dumps(description))
        self._text = _without_control_tokens(description, self.added_ids)
        self.vocab_size: int = self._template.get_vocab_size()

    def encode_text(self, text: str) -> list[int]:
        """Untrusted content, whatever it spells. Lone surrogates become U+FFFD."""
        ids = _encode(self._text, text)
        if not self.added_ids.isdisjoint(ids):
            found = next(token for token in ids if token in self.added_ids)
            raise ValueError(
                f"tokenizer must not write control tokens from content, got id {found} "
                f"({self._template.id_to_token(found)!r}). This tokenizer can't be used safely."
            )
        return ids

    def encode_template(self, text: str) -> list[int]:
        """Trusted template text: control tokens are recognised."""
        return _encode(self._template, text)

    def encode_reply(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """Template text (True) and contents (False) as the one text that a policy would have written.

        Only in template text are control tokens recognised; what stands between two of them is encoded as a whole.
        """
        ids: list[int] = []
        plain = ""
        for text, trusted in parts:
            start = 0
            encoding = self._template.encode(text, add_special_tokens=False) if trusted else None
            for token, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True) if encoding else ():
                if token in self.added_ids:
                    ids += [*self.encode_text(plain + text[start:begin]), token]
                    plain, start = "", end
            plain += text[start:]
        return ids + self.encode_text(plain)

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to a text, which need not be whole characters."""
        written = str(self._template.id_to_token(token))
        if token in self.added_ids:
            return written.encode()
        if self._byte_level:
            return bytes(_BYTE_OF[character] for character in written)
        if match := _BYTE_TOKEN.fullmatch(written):
            return bytes([int(match[1], 16)])
        return written.replace(_SENTENCEPIECE_SPACE, " ").encode()

    def decode(self, ids: Sequence[int]) -> str:
        """Text for people and parsers, control tokens visible. Unknown ids are left out."""
        return str(self._template.decode(list(ids), skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        found: int | None = self._template.token_to_id(token)
        return found

    def first_of(self, ids: Iterable[int], text: str) -> tuple[int, int] | None:
        """The first token of template text that is one of `ids`, and the character offset it ends at."""
        wanted = frozenset(ids)
        encoding = self._template.encode(text, add_special_tokens=False)
        for token, (_, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in wanted:
                return token, end
        return None

    def boundary(self, text: str, at: int) -> int:
        """The last border between tokens of template text at or before character `at`."""
        offsets = self._template.encode(text, add_special_tokens=False).offsets
        return max((end for _, end in offsets if end <= at), default=0)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    except TypeError:  # what the tokenizer raises for text that UTF-8 can't hold
        ids = tokenizer.encode(_LONE_SURROGATE.sub("\ufffd", text), add_special_tokens=False).ids
    return ids


def _only_pieces(description: dict[str, Any]) -> None:
    """Switch off what is meant for whole texts: special tokens, prefix spaces, truncation, padding."""
    description.update(truncation=None, padding=None, post_processor=None)
    if description["model"].get("dropout") is not None:
        description["model"]["dropout"] = None
    for kind, parts in (
        ("normalizer", "normalizers"),
        ("pre_tokenizer", "pretokenizers"),
        ("decoder", "decoders"),
    ):
        component = description.get(kind)
        if component is None:
            continue
        rows = component[parts] if component["type"] == "Sequence" else [component]
        kept = [_without_prefix(row) for row in rows if not _is_prefix(row)]
        description[kind] = {"type": "Sequence", parts: kept} if kept else None


def _is_prefix(component: Mapping[str, Any]) -> bool:
    """Adds a space before a text, or takes it away again."""
    return component["type"] == "Prepend" or (component["type"] == "Strip" and component.get("content") == " ")


def _without_prefix(component: dict[str, Any]) -> dict[str, Any]:
    if component["type"] == "Metaspace":
        rest = {key: value for key, value in component.items() if key != "add_prefix_space"}
        return {**rest, "prepend_scheme": "never"}
    return {**component, "add_prefix_space": False} if "add_prefix_space" in component else component


def _is_plain_text(added: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """White space (GPT-NeoX, Gemma) carries no control; the unknown token is what plain text turns into."""
    content = str(added["content"])
    if content.replace(_SENTENCEPIECE_SPACE, " ").isspace() or content == model.get("unk_token"):
        return True
    return model.get("unk_id") is not None and added["id"] == model["unk_id"]


def _without_control_tokens(description: dict[str, Any], control: frozenset[int]) -> Tokenizer:
    """The tokenizer, ignorant of control tokens: as added tokens, vocabulary entries and merge results.

    Leaving them in the vocabulary would be a way in: merges can spell them, and `ignore_merges` looks words
    up whole.
    """
    model = dict(description["model"])
    plain = [row for row in description["added_tokens"] if row["id"] not in control]
    if isinstance(model["vocab"], dict):
        removed = {token for token, token_id in model["vocab"].items() if token_id in control}
        model["vocab"] = {token: i for token, i in model["vocab"].items() if token not in removed}
        # An added token outside the vocabulary would be numbered anew; as an entry it keeps its id.
        model["vocab"].update({row["content"]: row["id"] for row in plain})
        if removed and "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if removed.isdisjoint(_mentioned(pair))]
    else:
        model["vocab"] = [
            ["", score] if i in control else [piece, score] for i, (piece, score) in enumerate(model["vocab"])
        ]
    return Tokenizer.from_str(json.dumps({**description, "added_tokens": plain, "model": model}))


def _mentioned(merge: str | Sequence[str]) -> tuple[str, str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right
