import pytest

from context import Message, Renderer
from context.templates.rendering.reply_end import Sampled
from tests.fakes.conversations import ASKED
from tests.fakes.families import family
from tests.fakes.real_templates import renderer

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
def test_empty_thought_that_a_template_drops_later_is_no_part_of_the_next_prompt(name: str, content: str) -> None:
    made = renderer(name)
    reply = Message("assistant", content, "llm", reasoning="")
    *ids, stop = made.reply(made.render(ASKED, ()), reply)
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
    return family("chatml").renderer(_TURNS.replace("MARKED", marked))


@pytest.mark.parametrize("content", ["hi", ""])
def test_markup_is_a_rewrite_unless_every_reply_has_it(content: str) -> None:
    reply, stop = Message("assistant", content, "llm"), family("chatml").end_id
    for said in (content, f"{content} id=2"):
        assert extends(with_ids(""), reply, said, stop)
    assert not extends(with_ids("and loop.last"), reply, f"{content} id=2", stop)
    assert not extends(with_ids("and not loop.last"), reply, content, stop)


def test_stop_token_that_opens_the_next_turn_is_written_behind_another_end() -> None:
    made = renderer("glm4moe")
    end, user = (made.codec.token_id(token) for token in ("</s>", "<|user|>"))
    assert {end, user} <= made.stop_ids
    before = made.render(ASKED, ())
    grown = made.render([*ASKED, Message("assistant", "hi", "llm"), Message("user", "more")], (), after=before)
    for stop, written in ((end, "<|user|>\nmore"), (user, "\nmore")):
        found = made.increment(before, grown, Sampled("hi", stop))
        assert found is not None and made.codec.decode(found.token_ids.tolist()).startswith(written)
