"""Real templates with real kinds of tokenizers: every prompt of an episode is the one that transformers makes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest

from context import ContextManager, Message, RenderError, ToolCall, default_authors, loss_mask
from context.parse import KnownReply
from context.strategies import ClipToolResults, Linear, LinearThink, SlidingWindow, Strategy
from context.strategies.protocol import Append, Arrangement, History
from context.templates.chat_template import LOOKUP
from context.templates.rendering import contents
from context.templates.rendering.conversation_writer import Rendering
from tests.fakes.real_templates import BUILT_IN, KINDS, REPRESENTATIVE, SIX, real_template, real_templates
from tests.fakes.template_reference import Subject, subject
from tests.fakes.tokenizer_kinds import tokenizer_kinds

SOAK = pytest.mark.soak
CASES = [
    *((name, kind) for name in SIX for kind in KINDS),
    *((name, "byte_bpe") for name in BUILT_IN),
    *(pytest.param(row.name, "byte_bpe", marks=SOAK) for row in real_templates() if row.name not in (*SIX, *BUILT_IN)),
    *(pytest.param(one, kind, marks=SOAK) for kind in tokenizer_kinds() for one in REPRESENTATIVE if kind not in KINDS),
]
BY_NUMBER = Message("assistant", "", "initialization", (ToolCall("lookup", {"n": 10**40}, "call00000"),))
ECHO = 'Twelve is the number of the "second" record.'
SYSTEM, USER = Message("system", "  Answer in 中文 or 日本語 😀\n", "initialization"), Message("user", "Which code?")
FEW_SHOT = (SYSTEM, Message("user", "France?"), Message("assistant", "Paris.", "initialization"), USER)


def said(content: str, given: str, thought: str | None = None) -> tuple[Message, Message]:
    return Message("assistant", content, "llm", reasoning=thought), Message("user", given)


def called(number: int, key: str, result: str, thought: str | None = None) -> tuple[Message, Message]:
    call_id = f"call{number:05d}"
    said = Message("assistant", "", "llm", (ToolCall("lookup", {"key": key, "n": number}, call_id),), reasoning=thought)
    return said, Message("tool", result, "env", name="lookup", tool_call_id=call_id)


CONVERSATIONS = {
    "few-shot": (FEW_SHOT, [said("是 78。😀\n\n好的", "  two spaces\n\n\nthree lines"), said("Twelve.", "12")], ()),
    "calls": (
        (SYSTEM, USER),
        [called(1, '真珠 "pearl"\n\\', '{"值": "é😀"}'), called(2, "coral", "12"), said("It is 78.", "More?")],
        (LOOKUP,),
    ),
    "long": ((USER,), [called(n, f"record {n}", f'See "{n + 1}".\n' * 6) for n in range(6)], (LOOKUP,)),
    "thoughts": (
        (USER,),
        [
            called(1, "pearl", "See coral.", "I should look it up."),
            called(2, "coral", "78", "Now coral.\nThen I know."),
            said("It is 78.", "And the next?", "The record says so."),
            said("It is 79.", "Thanks.", "One more."),
        ],
        (LOOKUP,),
    ),
    "echoes": (
        (Message("user", ECHO), BY_NUMBER, called(0, "", f'{{"n": {10**40}}}')[1]),
        [called(123456789, "pearl", '{"key": "pearl", "n": 123456789}'), said(ECHO, ECHO)],
        (LOOKUP,),
    ),
    "nothing said": ((USER,), [said("", "Again."), said("", "And again.", ""), called(1, "", "x", "")], (LOOKUP,)),
}


@dataclass
class Watched(Strategy):
    strategy: Strategy
    arrangement: Arrangement | None = None
    view: tuple[Message, ...] = field(default=())

    def arrange(self, history: History) -> Arrangement:
        self.arrangement = self.strategy.arrange(history)
        self.view = getattr(self.arrangement, "messages", history.messages)
        return self.arrangement


@cache
def made(name: str, kind: str) -> Subject:
    return subject(real_template(name), kind)


def sampled_all_the_same(model: Subject, prompt: Rendering, reply: Message) -> list[int]:
    """What a policy may say where nobody could demonstrate it: it closes the thought that its prompt opens."""
    opened, asked = prompt.opened_thought, prompt.written.text
    whole = model.reference.text((*prompt.given, reply), prompt.tools, prompted=False) or ""
    if not whole.startswith(asked.removesuffix(opened)):
        return []
    thought = f"{reply.reasoning or ''}\n</think>\n\n" if opened else ""
    ids = model.renderer.codec.encode(thought + whole[len(asked) - len(opened) :])
    return ids[: 1 + next((place for place, token in enumerate(ids) if token in model.renderer.stop_ids), -1)]


def play(model: Subject, conversation: str, strategy: Strategy) -> tuple[int, list[list[int]]]:
    """Play the conversation and check each prompt; how many of them were transformers' as a whole, and the authors.

    What was sampled stays as it is: where the template has other words for it, what follows is transformers'.
    """
    opening, turns, tools = CONVERSATIONS[conversation]
    watched, parser, reference = Watched(strategy, view=opening), KnownReply(), model.reference
    context = ContextManager(model.renderer, parser, max_tokens=10**6, strategy=watched)
    try:
        context.begin(opening, tools)
    except ValueError:
        assert not reference.shows_all(opening, tools)
        return 0, []

    def reads(ids: Sequence[int]) -> str:
        return reference.decode(ids) if model.lossless else "".join(reference.decode(ids).split())

    sampled: list[int] = []
    natural = True  # every reply of the segment is what the template writes for it
    before, appended, whole, rewrites = [*context.prompt_ids], "", 0, 0
    for reply, given in turns:
        text, ids = reference.text(watched.view, tools), [*context.prompt_ids]
        assert text is not None
        if ids[: len(before)] != before or not sampled:
            assert ids == reference.ids(text)
            assert sum(context.rewrites.values()) > rewrites or not sampled
            assert not (isinstance(watched.arrangement, Append) and text.startswith(appended)), "a needless segment"
            whole, natural = whole + 1, True
        else:
            assert reads(reference.ids(text)).endswith(reads(ids[len(before) :]))
            natural = natural and text.startswith(appended)
            if natural:
                assert reads(ids) == reads(reference.ids(text))
                whole += 1
        try:
            spoken = model.renderer.reply(context.prompt, reply)
        except RenderError:
            spoken = sampled_all_the_same(model, context.prompt, reply)
            if not spoken:
                break
        parser.message = reply
        context.record_reply(spoken, [-0.25] * len(spoken), policy_version=0)
        sampled += spoken
        before, appended = [*ids, *spoken], text + reference.decode(spoken)
        rewrites = sum(context.rewrites.values())
        watched.arrangement = None
        if context.observe([given]) is not None:
            assert context.stopped == "context_full" or not reference.shows_all((*watched.view, reply, given), tools)
            break
    tokens = [segment.tokens for segment in context.segments()]
    assert [token for each in tokens for token in each.token_ids[loss_mask(each, default_authors())]] == sampled
    return whole, [each.authors.tolist() for each in tokens]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_prompts_of_real_templates_are_what_transformers_writes_and_reads(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(name, kind)
    budget = len(model.reference.ids(model.reference.text((USER,), (LOOKUP,)) or "x")) + 150
    played = [play(model, conversation, Linear()) for conversation in CONVERSATIONS]
    if kind == "byte_bpe" and name in (*SIX, *BUILT_IN):
        assert sum(whole for whole, _ in played) >= 11
    for conversation in CONVERSATIONS:
        play(model, conversation, LinearThink())
    for strategy in (SlidingWindow(budget), ClipToolResults(budget, keep_chars=1, marker="~")):
        play(model, "long", strategy)
    # What is found by its text alone has the authors that marks tell.
    monkeypatch.setattr(contents, "_LONG", 10**9)
    assert played == [play(model, conversation, Linear()) for conversation in CONVERSATIONS]
