"""Places of tokens that are counted are those that the tokenizer names."""

from __future__ import annotations

import json
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from context.tokens.byte_level import TokenPlaces
from tests.fakes.tokenizer_kinds import tokenizer_kinds

SOURCE = "<|im_start|><|im_end|><|endoftext|><tool_call></tool_call>"
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
TEXTS = st.lists(st.sampled_from(PARTS)).map("".join)


def made(kind: str, normalizer: object = None) -> tuple[Tokenizer, TokenPlaces]:
    description = json.loads(tokenizer_kinds()[kind](SOURCE))
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
@given(text=TEXTS)
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
