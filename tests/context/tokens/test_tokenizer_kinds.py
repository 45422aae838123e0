"""Each kind of tokenizer is what it says, and prompts have its own tokens: those that transformers gives."""

from __future__ import annotations

from functools import cache

import pytest
from tokenizers import Tokenizer

from context import Message
from tests.fakes.real_templates import real_template
from tests.fakes.scripted_conversations import scripted_conversations
from tests.fakes.template_subjects import Subject, subject
from tests.fakes.tokenizer_kinds import controls_of, tokenizer_kinds

TEMPLATES = ("axolotl/chatml", "written/mistral_v0_3", "written/concatenates")
SOURCE = "<s> <|im_start|> <|im_end|> </s>"


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_kinds()[kind](SOURCE))


def pieces(kind: str, text: str) -> list[str]:
    found: list[str] = tokenizer(kind).encode(text, add_special_tokens=False).tokens
    return found


@cache
def model(name: str, kind: str) -> Subject:
    return subject(real_template(name), kind)


@pytest.mark.parametrize("kind", tokenizer_kinds())
def test_each_kind_reads_every_control_token_that_a_template_spells_as_one_token(kind: str) -> None:
    names = controls_of(SOURCE)
    assert names == ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    for name in names:
        assert len(tokenizer(kind).encode(f"a {name} b", add_special_tokens=False).ids) > 2
        assert tokenizer(kind).encode(name, add_special_tokens=False).ids == [tokenizer(kind).token_to_id(name)]


def test_a_word_behind_a_control_token_begins_as_each_kind_has_it() -> None:
    text = "</s>the code"
    first = {kind: pieces(kind, text)[1] for kind in tokenizer_kinds()}
    assert {kind for kind, piece in first.items() if piece.startswith("\u2581")} == {
        "sp_legacy",
        "sp_always",
        "unigram",
        "unigram_spaces",
        "strips",
    }
    assert pieces("sp_first", "the")[0].startswith("\u2581")
    assert not pieces("sp_never", "the")[0].startswith("\u2581")


def test_kinds_differ_in_bytes_case_forms_and_white_space() -> None:
    assert pieces("sp_legacy", "\u03a9")[-2:] == ["<0xCE>", "<0xA9>"]
    assert pieces("unigram", "\u03a9")[-2:] == ["<0xCE>", "<0xA9>"]
    assert pieces("wordpiece", "CODE") == pieces("wordpiece", "code")
    assert pieces("nfkc", "\uff43\uff4f\uff44\uff45") == pieces("nfkc", "code")
    assert pieces("nfkc", "\uff1c\uff53\uff1e") != ["<s>"]  # a special token is not normalized
    assert pieces("nfkc", "\uff1c\uff5cim_end\uff5c\uff1e") == ["<|im_end|>"]  # the others are
    assert "sop" in pieces("words", "sopping")
    assert pieces("strips", "</s>  a") == ["</s>  ", "\u2581a"]
    assert pieces("strips", "a<s>b").count("<s>") == 0
    assert pieces("unigram_spaces", "a  b").count("  ") == 1
    assert pieces("byte_bpe", " 1024") != pieces("byte_bpe_split", " 1024")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", tokenizer_kinds())
def test_tokens_of_a_first_prompt_are_those_of_transformers(kind: str, name: str) -> None:
    reference = model(name, kind).reference
    compared = 0
    for script in scripted_conversations():
        text = reference.text(script.opening, script.tools)
        if text is None or reference.spells_control(script.opening, script.tools):
            continue
        tokens = model(name, kind).renderer.initial(script.opening, script.tools)
        assert tokens.token_ids.tolist() == reference.ids(text), script.name
        compared += 1
    assert compared >= 6


@pytest.mark.parametrize("kind", tokenizer_kinds())
def test_white_space_at_the_ends_of_contents_is_kept_or_lost_as_by_transformers(kind: str) -> None:
    reference = model("written/concatenates", kind).reference
    for text in (" a", "a ", "  a  ", "\na\n", "\t", "a\n\n b"):
        conversation = [Message("user", text)]
        whole = reference.text(conversation, ())
        assert whole is not None
        tokens = model("written/concatenates", kind).renderer.initial(conversation, ())
        assert tokens.token_ids.tolist() == reference.ids(whole), text
