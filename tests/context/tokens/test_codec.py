"""Tokens, their places and control tokens are those that each kind of tokenizer finds."""

from __future__ import annotations

import json
from functools import cache
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from context import Message
from context.tokens.byte_level import TokenPlaces
from context.tokens.codec import TokenCodec
from tests.fakes.real_templates import real_template
from tests.fakes.template_reference import subject
from tests.fakes.tokenizer_kinds import tokenizer_kinds

SOURCE = "<|im_start|><|im_end|><|im_end|>x<|endoftext|><tool_call></tool_call>[INST][/INST]"
# Of this kind any text that is not in the vocabulary becomes a control token.
KINDS = {name: make(SOURCE) for name, make in tokenizer_kinds().items() if name != "unk_is_eos"}
CONTROLS = sorted({row["content"] for made in KINDS.values() for row in json.loads(made)["added_tokens"]})
TEXTS = st.lists(
    st.sampled_from(
        [*CONTROLS, *(text[:-1] for text in CONTROLS), *(text[1:] for text in CONTROLS), " ", "\n", "a", "ﬁ", "😀"]
    ),
    max_size=8,
).map("".join)


@cache
def codec_of(kind: str) -> tuple[TokenCodec, Tokenizer]:
    tokenizer = Tokenizer.from_str(KINDS[kind])
    tokenizer.post_processor = None
    return TokenCodec(KINDS[kind]), tokenizer


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200)
@given(text=TEXTS)
def test_control_tokens_are_found_where_the_tokenizer_finds_them(kind: str, text: str) -> None:
    codec, tokenizer = codec_of(kind)
    encoding = tokenizer.encode(text, add_special_tokens=False)
    expected = [
        (token, *place) for token, place in zip(encoding.ids, encoding.offsets, strict=True) if token in codec.added_ids
    ]
    assert [(found.token, found.first, found.end) for found in codec.controls(text)] == expected


BYTES = "<|im_start|><|im_end|><|endoftext|><tool_call></tool_call>"
COMPOSES = {"type": "NFC"}
PARTS = [
    *"ab .,\n",
    "\u00e9",
    "e\u0301",
    "\u6771",
    "\U0001f642",
    "\U0001f469\u200d\U0001f680",
    "\u1e9b\u0323",
    "<|im_end|>",
]
PIECES = st.lists(st.sampled_from(PARTS)).map("".join)


def made(kind: str, normalizer: object = None) -> tuple[Tokenizer, TokenPlaces]:
    description = json.loads(tokenizer_kinds()[kind](BYTES))
    if normalizer is not None:
        description["normalizer"] = normalizer
    description["post_processor"] = None
    tokenizer = Tokenizer.from_str(json.dumps(description))
    added = {row["id"] for row in description["added_tokens"]}
    return tokenizer, TokenPlaces(description, tokenizer.get_vocab(with_added_tokens=True), added)


BYTE_LEVEL = {
    (kind, composes): made(kind, COMPOSES if composes else None)
    for kind in ("byte_bpe", "byte_bpe_split")
    for composes in (False, True)
}


@pytest.mark.parametrize("kind", BYTE_LEVEL, ids=str)
@settings(max_examples=300)
@given(text=PIECES)
def test_counted_places_are_those_that_the_tokenizer_names(kind: tuple[str, bool], text: str) -> None:
    tokenizer, places = BYTE_LEVEL[kind]
    encoding = tokenizer.encode(text, add_special_tokens=False)
    firsts = places.firsts(text, np.array(encoding.ids, np.int32))
    if firsts is not None:
        assert firsts.tolist() == list(accumulate((first for first, _ in encoding.offsets), max))
    assert (firsts is None) == (not text or (kind[1] and tokenizer.normalizer.normalize_str(text) != text))


@pytest.mark.parametrize("kind", ["sp_always", "unigram", "wordpiece"])
def test_places_are_not_counted_where_tokens_are_no_bytes(kind: str) -> None:
    tokenizer, places = made(kind)
    ids = np.array(tokenizer.encode("a b", add_special_tokens=False).ids, np.int32)
    assert places.firsts("a b", ids) is None


@pytest.mark.parametrize("kind", tokenizer_kinds())
def test_white_space_at_the_ends_of_contents_is_kept_or_lost_as_by_transformers(kind: str) -> None:
    model = subject(real_template("written/concatenates"), kind)
    for text in (" a", "a ", "  a  ", "\na\n", "\t", "a\n\n b"):
        conversation = [Message("user", text)]
        whole = model.reference.text(conversation, ())
        assert whole is not None
        tokens = model.renderer.initial(conversation, ())
        assert tokens.token_ids.tolist() == model.reference.ids(whole), text
