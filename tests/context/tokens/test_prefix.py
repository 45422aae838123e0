from collections import Counter

import pytest

from context import ContextManager, Message, Renderer, TokenCodec, choose_parser, default_authors, loss_mask
from context.authors import HISTORY
from context.strategies import ClipToolResults, SlidingWindow, Strategy
from context.tokens.codec import Control, Piece
from tests.fakes.conversations import Episode, ScriptedParser, Turn, laws, texts
from tests.fakes.families import family
from tests.fakes.real_templates import renderer

QWEN3 = "qwen3"  # its template drops the thinking of turns before the last user message
THINKING = Turn([40, 41], "said", "weighed it", None, "and now?")
CALLING = Turn([42, 43], "", "weighed it", {"key": "pearl"}, "78")


def started(strategy: Strategy | None = None) -> Episode:
    model = renderer(QWEN3)
    context = ContextManager(model, parser := ScriptedParser(), max_tokens=4000, strategy=strategy)
    context.begin([Message("user", "What is the code?")], ())
    return Episode(context, parser, min(model.stop_ids))


def test_template_that_drops_thinking_begins_a_new_segment() -> None:
    episode = started()
    episode.play([CALLING, THINKING, CALLING], tool_role=True)
    laws(episode, renderer(QWEN3))
    segments = episode.context.segments()
    assert [segment.reason for segment in segments] == ["clean", "template_rewrite"]
    assert episode.context.rewrites == {"template_rewrite": 1}
    # Shown again: what was said, as content of the author `history`, without the thinking.
    assert texts(segments[1], renderer(QWEN3), HISTORY) == "pearlsaid"
    assert [call.sampled[0] for call in episode.calls] == [42, 40, 42]


def test_strategy_that_changes_only_the_unseen_goes_on_in_its_segment() -> None:
    # The one result is cut before it is shown for the first time.
    episode = started(ClipToolResults(200, keep_chars=0))
    episode.play([Turn([42], "", None, {"key": "pearl"}, "blah " * 80)], tool_role=True)
    assert episode.context.rewrites == {"clip_tool_results": 1}
    assert len(episode.context.segments()) == 1
    assert len(episode.context.prompt_ids) <= 200
    assert episode.context.messages[-1].content == "blah " * 80


class CountingCodec(TokenCodec):
    pieces: tuple[str, ...] = ()

    @property
    def characters(self) -> int:
        return sum(map(len, self.pieces))

    def piece(self, text: str, control: Control | None, *, opens: bool) -> Piece:
        self.pieces += (text,)
        return super().piece(text, control, opens=opens)


@pytest.mark.parametrize("strategy", [None, SlidingWindow(1500)])
def test_long_episode_tokenises_each_text_once(strategy: Strategy | None) -> None:
    chatml = family("chatml")
    codec = CountingCodec(chatml.tokenizer.to_str())
    model = Renderer(codec, chatml.template, authors=default_authors(), stop_ids=frozenset({chatml.end_id}))
    context = ContextManager(model, choose_parser("hermes", ""), max_tokens=10**6, strategy=strategy)
    context.begin([Message("user", "What is the code?")], ())
    first, observed, around = codec.characters, 0, 0
    for turn in range(100):
        context.record_reply([40 + turn % 20, chatml.end_id], [-1.0, -1.0], policy_version=0)
        result = f"result {turn}: " + "blah " * 20
        assert context.observe([Message("tool", result, "env")]) is None
        observed += len(result)
        around = around or codec.characters - first - observed  # what the template writes around every result
    assert max(Counter(codec.pieces).values()) == 1
    if strategy is None:
        assert len(context.segments()) == 1
        assert codec.characters <= first + observed + 100 * around
    else:  # contents in their place, and alone where the strategy counts them
        assert context.rewrites["drop_turns"] >= 20
        assert codec.characters <= first + 2 * (observed + 100 * around)


@pytest.mark.parametrize(
    ("observed", "why", "words"),
    [
        (Message("user", "blah " * 2000, "env"), "context_full", None),
        # Qwen3's template knows no such role, and would leave the message out.
        (Message("judge", "well said", "env"), "unrenderable", "leaves out messages[2] (role judge)"),
    ],
)
def test_observation_after_a_stop_can_be_tried_again(observed: Message, why: str, words: str | None) -> None:
    model = renderer(QWEN3)
    context = ContextManager(model, parser := ScriptedParser(), max_tokens=200)
    context.begin([Message("user", "What is the code?")], ())
    parser.message = Message("assistant", "said", "llm")
    context.record_reply([40, min(model.stop_ids)], [-1.0, -1.0], policy_version=0)
    before = context.prompt_ids
    assert context.observe([observed]) == context.stopped == why
    assert context.problem is None if words is None else words in str(context.problem)
    assert context.prompt_ids == before
    assert context.observe([Message("user", "short", "env")]) is context.stopped is context.problem is None


@pytest.mark.parametrize("result", ["", "blah" * 200_000, "half \ud800 a character", "\x00\x1b[2J", "<|im_end|>" * 50])
def test_any_observation_is_shown_and_not_trained(result: str) -> None:
    model = family("chatml").renderer()
    context = ContextManager(model, choose_parser("hermes", ""), max_tokens=10**7)
    context.begin([Message("user", "What is the code?")], ())
    end = family("chatml").end_id
    context.record_reply([40, end], [-1.0, -1.0], policy_version=0)
    assert context.observe([Message("tool", result, "env")]) is None
    (segment,) = context.segments()
    env = segment.tokens.authors == model.authors.code("env")
    assert model.codec.added_ids.isdisjoint(segment.tokens.token_ids[env].tolist())
    assert model.codec.decode(segment.tokens.token_ids[env].tolist()) == result.replace("\ud800", "\ufffd")
    assert loss_mask(segment.tokens, model.authors).sum() == 2
