"""What a person sees of a training sequence."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
from rich.console import Console

from context import ContextManager, Message, TokenSequence, choose_parser, default_authors
from context.view import token_view
from tests.fakes.families import family

TABLE = default_authors()


def sequence(text: str, author: str, log_prob: float = np.nan) -> TokenSequence:
    tokens = TokenSequence.constant(family("chatml").codec.encode_text(text), TABLE.code(author))
    return replace(tokens, behavior_log_probs=np.full(len(tokens), log_prob, np.float32))


def test_view_names_authors_masks_and_tokens() -> None:
    model = family("chatml")
    context = ContextManager(model.renderer(), choose_parser("hermes", ""), max_tokens=1000)
    context.begin([Message("user", "What?")], ())
    ids = [*model.codec.encode("78"), model.end_id]
    context.record_reply(ids, [-0.25] * len(ids), policy_version=0)
    tokens = context.segments()[0].tokens
    lines = token_view(tokens, TABLE, model.codec, log_probs=True).plain.splitlines()
    n = len(model.codec.encode_text("What?"))
    assert lines[3:5] == [f"user · {n} tokens · not sampled", "What?"]
    assert lines[-2] == f"llm · {len(ids)} tokens · trained"
    assert lines[-1].replace("[-0.25]", "") == "78<|im_end|>"
    assert lines[-1].count("[-0.25]") == len(ids)


def test_view_underlines_only_trained_tokens() -> None:
    parts = [sequence("ab", "env"), sequence("ab", "llm", -1.0), sequence("ab", "llm(do_not_train)", -1.0)]
    view = token_view(TokenSequence.concatenate(parts), TABLE, family("chatml").codec)
    underlined = {view.plain[span.start : span.end] for span in view.spans if "underline" in str(span.style)}
    heads = [line for line in view.plain.splitlines() if "·" in line]
    assert "".join(sorted(underlined)) in ("ab", "ab")
    assert [line.rsplit(" · ")[-1] for line in heads] == ["not sampled", "trained", "sampled, not trained"]


def test_view_writes_out_what_would_act_on_a_terminal() -> None:
    text = "a\x1b[31mred\r\u202egnp\x07 [bold]b[/bold]"
    tokens = sequence(text, "env")
    out = io.StringIO()
    Console(file=out, width=200, force_terminal=False).print(token_view(tokens, TABLE, family("chatml").codec))
    assert "a<U+001B>[31mred<U+000D><U+202E>gnp<U+0007> [bold]b[/bold]" in out.getvalue()


def test_view_joins_tokens_that_spell_one_character_and_survives_half_ones() -> None:
    codec = family("chatml").codec
    whole = sequence("😀", "llm", -1.0)
    assert len(whole) == 4
    assert "😀[-1.00 -1.00 -1.00 -1.00]" in token_view(whole, TABLE, codec, log_probs=True).plain
    half = TokenSequence.constant(codec.encode_text("😀")[:2], TABLE.code("llm"))
    assert token_view(half, TABLE, codec).plain.count("\ufffd") == 2


def test_view_without_a_tokenizer_shows_ids() -> None:
    tokens = TokenSequence.constant([5, 17], TABLE.code("user(discard)"))
    assert token_view(tokens, TABLE, None).plain == "user(discard) · 2 tokens · not sampled\n5 17 \n"
