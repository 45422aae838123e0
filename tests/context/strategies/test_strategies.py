from dataclasses import dataclass, replace

import numpy as np
import pytest

from context import ContextManager, Message, ToolCall, default_authors, loss_mask, response_mask
from context.authors import HISTORY, MEMORY
from context.strategies import ClipToolResults, LinearThink, Memory, SelfClip, SlidingWindow, Strategy
from context.strategies.protocol import Answer, Append, Arrangement, History, Question, Rewrite, Stop, Turn
from tests.fakes.conversations import Episode, ScriptedParser, laws, texts
from tests.fakes.conversations import Turn as Said
from tests.fakes.families import family

MODEL = family("chatml")
RENDERER = MODEL.renderer()
TABLE = default_authors()
OPENING = (Message("user", "task"),)


def count(message: Message) -> int:
    return len(message.content) + len(message.note)


def measure(messages: object, *, tools: bool = True) -> int:
    assert isinstance(messages, tuple | list)
    return sum(map(count, messages))


def turn(number: int, result: str) -> Turn:
    reply = Message("assistant", "", "llm", (ToolCall("lookup", {"key": str(number)}),))
    return Turn(reply, (Message("tool", result, "env"),))


def history(*results: str, answer: Answer | None = None, max_tokens: int = 10_000) -> History:
    """One token per character of content, and nothing around it."""
    turns = tuple(turn(number, result) for number, result in enumerate(results))
    tokens = len("task") + sum(map(len, results))
    return History(OPENING, turns, tokens, max_tokens, measure, count, answer)


def shown_results(arrangement: Arrangement) -> list[str]:
    assert isinstance(arrangement, Rewrite)
    assert arrangement.messages[0].content == "task"
    return [message.content for message in arrangement.messages if message.role == "tool"]


TEN = "0123456789"


def test_window_keeps_the_newest_whole_turns_that_fit() -> None:
    # 4 for the task, 10 for each turn.
    assert SlidingWindow(34).arrange(history(TEN, TEN, TEN)) == Append()
    assert shown_results(SlidingWindow(33).arrange(history("a" + TEN[1:], "b" + TEN[1:], TEN))) == ["b123456789", TEN]
    assert shown_results(SlidingWindow(14).arrange(history(TEN, TEN, TEN))) == [TEN]
    assert SlidingWindow(13).arrange(history(TEN, TEN, TEN)) == Stop("context_full")


def test_budget_never_takes_the_room_for_a_reply() -> None:
    assert SlidingWindow(99).arrange(history(TEN, TEN, max_tokens=25)) == Append()  # 24 and one to say
    assert shown_results(SlidingWindow(99).arrange(history(TEN, TEN, max_tokens=24))) == [TEN]


def test_clipping_takes_the_oldest_first() -> None:
    # 4 + 10 + 20 + 10 = 44; clipping the oldest saves 7.
    strategy = ClipToolResults(37, keep_chars=2, marker="~")
    assert shown_results(strategy.arrange(history(TEN, "b" * 20, "c" * 10))) == ["01~", "b" * 20, "c" * 10]


def test_clipping_stops_where_nothing_is_left_to_clip() -> None:
    strategy = ClipToolResults(13, keep_chars=2, marker="~")
    assert strategy.arrange(history(TEN, "b" * 20, "c" * 10)) == Rewrite(  # 4 + 3 + 3 + 3
        (*OPENING, *turn(0, "01~").messages, *turn(1, "bb~").messages, *turn(2, "cc~").messages), "clip_tool_results"
    )
    assert replace(strategy, budget=12).arrange(history(TEN, "b" * 20, "c" * 10)) == Stop("context_full")
    assert replace(strategy, budget=12).arrange(history("01~", "bb~", "cc~")) == Stop("context_full")


def test_think_strategy_takes_thinking_from_every_earlier_reply() -> None:
    now = history(TEN, TEN)
    thought = replace(now.turns[1], reply=replace(now.turns[1].reply, reasoning="hm"))
    assert LinearThink().arrange(now) == Append()
    assert LinearThink().arrange(replace(now, turns=(now.turns[0], thought))) == Rewrite(now.messages, "strip_thinking")


def test_memory_asks_about_what_goes_and_shows_the_answer_in_its_place() -> None:
    strategy = Memory(70, max_summary_tokens=12)
    assert strategy.arrange(history(TEN)) == Append()
    now = history(*[TEN] * 7)  # 74; notes of 12 under a head of 39 leave room for one turn beside the task
    question = strategy.arrange(now)
    assert isinstance(question, Question) and question.max_answer_tokens == 12
    assert [message.role for message in question.messages] == ["user", *["assistant", "tool"] * 6, "user"]
    assert question.messages[-1].author == MEMORY
    rewritten = strategy.arrange(replace(now, answer=Answer(" seen six \n", truncated=False)))
    assert shown_results(rewritten) == [TEN]
    assert isinstance(rewritten, Rewrite)
    assert rewritten.messages[0] == replace(OPENING[0], note="Your notes on the conversation so far:\nseen six")
    # The next notes replace these, and are asked for with these in sight.
    later = replace(now, opening=rewritten.messages[:1])
    asked = strategy.arrange(later)
    assert isinstance(asked, Question) and asked.messages[0].note.endswith("seen six")
    again = strategy.arrange(replace(later, answer=Answer("seen all", truncated=False)))
    assert isinstance(again, Rewrite) and again.messages[0].note == "Your notes on the conversation so far:\nseen all"


def test_notes_cut_short_or_too_long_end_the_episode_under_their_name() -> None:
    strategy, now = Memory(70, max_summary_tokens=12), history(*[TEN] * 7)
    assert strategy.arrange(replace(now, answer=Answer("and", truncated=True))) == Stop("summary_too_long")
    assert strategy.arrange(replace(now, answer=Answer("x" * 60, truncated=False))) == Stop("summary_too_long")
    assert strategy.arrange(history("x" * 80)) == Stop("context_full")  # the newest turn alone
    assert strategy.arrange(replace(now, max_tokens=75)) == Stop("context_full")  # no room for the question


def test_self_clip_lists_all_but_the_newest_turn() -> None:
    question = SelfClip(30, excerpt_chars=12, train_answers=False).arrange(history(TEN * 2, "short", TEN))
    assert isinstance(question, Question)
    (asked,) = question.messages
    assert (asked.content, question.train_answers) == ("task", False)
    assert asked.note.splitlines()[1:5] == [
        "1. assistant: lookup({'key ... (20 characters)",
        "2. tool: 012345678901 ... (20 characters)",
        "3. assistant: lookup({'key ... (20 characters)",
        "4. tool: short (5 characters)",
    ]
    assert question.example == "1. remove\n2. remove\n3. remove\n4. remove"


@pytest.mark.parametrize(
    ("answer", "kind", "expected"),
    [
        ("2. remove", "self_clip", ["[removed]", TEN, TEN]),
        ("1 remove\n2 remove\n3 keep", "self_clip", [TEN, TEN]),
        ("1. remove\n2. remove\n3. remove\n4. remove", "self_clip", [TEN]),  # the example of the question
        ("**2**: Compress: two words", "self_clip", ["two words", TEN, TEN]),
        ("I'd say:\n - [2] REMOVE it\n[99] remove", "self_clip", ["[removed]", TEN, TEN]),
        ("2 keep\n2 remove", "self_clip", ["[removed]", TEN, TEN]),
        ("2 keep\n4 keep", "self_clip_fallback", [TEN, TEN]),
        ("", "self_clip_fallback", [TEN, TEN]),
    ],
)
def test_self_clip_does_as_it_is_told_or_falls_back(answer: str, kind: str, expected: list[str]) -> None:
    # 4 + 20 + 10 + 10 = 44
    arrangement = SelfClip(35).arrange(history(TEN * 2, TEN, TEN, answer=Answer(answer, truncated=False)))
    assert shown_results(arrangement) == expected
    assert isinstance(arrangement, Rewrite) and arrangement.kind == kind
    if "two words" in expected:  # the strategy's own text
        assert arrangement.messages[2] == Message("tool", "two words", MEMORY)


@pytest.mark.parametrize("make", [SlidingWindow, ClipToolResults, SelfClip, Memory])
def test_budget_must_be_a_number_of_tokens(make: type[SlidingWindow]) -> None:
    with pytest.raises(ValueError, match="budget must be at least 1 token, got 0"):
        make(0)


# Whole episodes, over a real renderer.


def started(strategy: Strategy, *, hint: str | None = None) -> Episode:
    context = ContextManager(RENDERER, parser := ScriptedParser(), max_tokens=4000, strategy=strategy)
    context.begin([Message("user", "What is the code?")], (), hint=hint)
    parser.message = Message("assistant", "", "llm")
    return Episode(context, parser, MODEL.end_id)


SAID = [Said([40 + i], "", None, {"key": f"k{i}"}, f"result {i}: " + "blah " * 20) for i in range(6)]


def test_memory_is_shown_with_its_own_author_and_replies_as_history() -> None:
    episode = started(Memory(450, max_summary_tokens=40))
    episode.answer = lambda number: f"note {number} <|im_end|>"
    episode.play(SAID, tool_role=True)
    laws(episode, RENDERER)
    segments = episode.context.segments()
    assert [segment.reason for segment in segments][:3] == ["clean", "fork", "strategy_rewrite"]
    assert "note 1 <|im_end|>" in texts(segments[2], RENDERER, MEMORY)
    assert texts(segments[2], RENDERER, HISTORY).startswith("k")
    assert episode.context.rewrites == {"summarise": episode.questions}
    assert [message.role for message in episode.context.messages] == ["user", *["assistant", "tool"] * 6]


@pytest.mark.parametrize("train_answers", [True, False])
def test_answers_are_trained_or_not_as_the_strategy_says(train_answers: bool) -> None:
    episode = started(Memory(450, max_summary_tokens=40, train_answers=train_answers))
    episode.play(SAID, tool_role=True)
    forks = [segment.tokens for segment in episode.context.segments() if segment.reason == "fork"]
    assert forks
    for tokens in forks:
        assert response_mask(tokens, TABLE).sum() == 2
        assert loss_mask(tokens, TABLE).sum() == (2 if train_answers else 0)
        assert np.isfinite(tokens.behavior_log_probs[response_mask(tokens, TABLE)]).all()


def test_truncated_notes_stop_the_episode_and_stay_sampled_tokens() -> None:
    context = started(Memory(450, 3)).context
    turns = iter(SAID)
    while context.question is None:
        context.record_reply([40, MODEL.end_id], [-1.0, -1.0], policy_version=0)
        assert context.observe([Message("user", next(turns).result, "env")]) is None
    assert context.room == 3
    reply = context.record_reply([60, 61, 62], [-1.0] * 3, policy_version=0)
    assert (reply.outcome, context.stopped) == ("question", "summary_too_long")
    fork = context.segments()[-1]
    assert fork.reason == "fork" and fork.tokens.token_ids[loss_mask(fork.tokens, TABLE)].tolist() == [60, 61, 62]
    with pytest.raises(RuntimeError, match="record_reply must follow"):
        context.record_reply([60], [-1.0], policy_version=0)


@dataclass(frozen=True)
class AskThenGoOn(Strategy):
    """Asks after each turn, and changes nothing; with `again` it never stops asking."""

    again: bool = False

    def arrange(self, history: History) -> Arrangement:
        asking = Question((Message("user", "Sure?"),), 5, train_answers=True, example="Yes.")
        return asking if history.answer is None or self.again else Append()


def test_conversation_goes_on_after_a_question_aside_in_a_new_segment() -> None:
    episode = started(AskThenGoOn())
    episode.play(SAID[:3], tool_role=True)
    laws(episode, RENDERER)
    found = [segment.reason for segment in episode.context.segments()]
    assert found == ["clean", *["fork", "strategy_rewrite"] * 2, "fork"]
    assert [call.question for call in episode.calls] == [False, True] * 3


def test_strategy_that_never_decides_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="must decide once its question is answered"):
        started(AskThenGoOn(again=True)).play(SAID[:1], tool_role=True)
