import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from context import Message
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
    read = tokenizer.encode(text, add_special_tokens=False)
    wanted = [(token, *place) for token, place in zip(read.ids, read.offsets, strict=True) if token in codec.added_ids]
    assert [(found.token, found.place.start, found.place.end) for found in codec.controls(text)] == wanted


@pytest.mark.parametrize("kind", tokenizer_kinds())
def test_white_space_at_the_ends_of_contents_is_kept_or_lost_as_by_transformers(kind: str) -> None:
    model = subject(real_template("written/concatenates"), kind)
    for text in (" a", "a ", "  a  ", "\na\n", "\t", "a\n\n b"):
        conversation = [Message("user", text)]
        whole = model.reference.text(conversation, ())
        assert whole is not None
        tokens = model.renderer.initial(conversation, ())
        assert tokens.token_ids.tolist() == model.reference.ids(whole), text


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_reply_is_the_text_that_the_tokenizer_itself_decodes(kind: str) -> None:
    model = subject(real_template("written/concatenates"), kind)
    for text in ("The code.", " The code.", "  The code.", ""):
        ids = model.renderer.codec.encode_text(text)
        said, stopped = model.renderer.said([*ids, min(model.renderer.stop_ids)])
        assert (said.text, stopped) == (model.reference.decode(ids), True)


@pytest.mark.parametrize("kind", tokenizer_kinds())
def test_no_kind_of_tokenizer_makes_a_control_token_of_a_text(kind: str) -> None:
    codec = TokenCodec(tokenizer_kinds()[kind](SOURCE))
    for token in codec.added_tokens:
        for text in (token, f"a{token}b", f" {token} ", token * 2, token.upper()):
            ids = codec.encode_text(text)
            assert codec.added_ids.isdisjoint(ids), (token, text)
            # These two change some letters themselves.
            assert codec.decode(ids).split() == text.split() or kind in ("nfkc", "unk_is_eos"), (token, text)


def test_tokenizer_whose_words_have_no_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="tokenizer must number the words of its vocabulary, as BPE does, got Unigram"):
        TokenCodec(Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)).to_str())
