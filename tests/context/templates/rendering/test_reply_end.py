"""Where a reply's turn ends: nothing that later prompts write otherwise is taken for what was said."""

from __future__ import annotations

import pytest

from context import ChatTemplate, ContextManager, Message, Renderer, choose_parser, default_authors
from context.templates.rendering.reply_end import Sampled
from tests.fakes.conversations import ASKED
from tests.fakes.families import family
from tests.fakes.trl_templates import renderer

_TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.role == 'assistant' MARKED %} id={{ loop.index }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def extends(made: Renderer, reply: Message, said: str, stop: int) -> bool:
    """Whether a prompt that goes on behind the reply is the one for it, with what was said."""
    before = made.render(ASKED, ())
    grown = made.render([*ASKED, reply, Message("user", "more")], (), after=before)
    return made.increment(before, grown, Sampled(said, stop)) is not None


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "lfm2_2_5"])
@pytest.mark.parametrize("content", ["", "said"])
def test_empty_thought_or_channel_that_a_template_drops_later_is_no_part_of_the_next_prompt(
    name: str, content: str
) -> None:
    made = renderer(name)
    reply = Message("assistant", content, "llm", reasoning="")
    *ids, stop = made.reply(reply)
    assert made.codec.added_ids.intersection(ids)
    assert not extends(made, reply, made.codec.decode(ids), stop)


def test_reply_without_a_thought_is_extended_though_its_template_writes_an_empty_one_for_the_last() -> None:
    made = renderer("qwen3")
    stop = min(made.stop_ids)
    for said in ("", "hi", "hi  there"):
        reply = Message("assistant", said, "llm")
        assert extends(made, reply, said, stop)
        assert not extends(made, reply, f"<think>\n\n</think>\n\n{said}", stop)


def with_ids(marked: str) -> Renderer:
    model = family("chatml")
    template = ChatTemplate(_TURNS.replace("MARKED", marked), {})
    return Renderer(model.codec, template, authors=default_authors(), stop_ids=frozenset({model.end_id}))


@pytest.mark.parametrize("said", ["hi", ""])
def test_markup_in_a_reply_that_later_prompts_write_otherwise_begins_a_segment(said: str) -> None:
    model, made = family("chatml"), with_ids("and not loop.last")
    template = made.template
    context = ContextManager(made, choose_parser("hermes", ""), max_tokens=1000)
    context.begin([Message("user", "x")], ())
    for _ in range(2):
        text = template.render([*context.messages, Message("assistant", said)], generation_prompt=False)
        prompt = template.render(context.messages, generation_prompt=True)
        assert model.codec.decode(list(context.prompt_ids)) == prompt
        # What the template has a policy say: up to where its version of the reply ends.
        ids = [*model.codec.encode_text(text.removeprefix(prompt).partition("<|im_end|>")[0]), model.end_id]
        context.record_reply(ids, [-1.0] * len(ids), policy_version=0)
        context.observe([Message("user", "more")])
    ids = [*model.codec.encode_text("z"), model.end_id]
    context.record_reply(ids, [-1.0] * len(ids), policy_version=0)
    assert [segment.reason for segment in context.segments()] == ["clean", "template_rewrite", "template_rewrite"]


@pytest.mark.parametrize("content", ["hi", ""])
def test_markup_in_every_reply_alike_is_no_rewrite(content: str) -> None:
    reply, stop = Message("assistant", content, "llm"), family("chatml").end_id
    for said in (content, f"{content} id=2"):
        assert extends(with_ids(""), reply, said, stop)
    assert not extends(with_ids("and loop.last"), reply, f"{content} id=2", stop)
