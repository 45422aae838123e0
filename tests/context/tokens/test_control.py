"""Which sampled tokens are kept out of training."""

from __future__ import annotations

import math

import numpy as np
import pytest

from context import ContextManager, Message, choose_parser, loss_mask, response_mask
from context.authors import DEMONSTRATION, LLM, LLM_DO_NOT_TRAIN, Author, AuthorTable, default_authors, discarded
from context.tokens.control import TrainingControl
from tests.fakes.families import family

MODEL = family("chatml")
TABLE = default_authors()


def trained_turns(control: TrainingControl, turns: int = 4) -> list[bool]:
    """Play an episode of one-token replies; whether each is trained."""
    context = ContextManager(MODEL.renderer(), choose_parser("hermes", ""), max_tokens=4000, control=control)
    context.begin([Message("user", "go")], ())
    for turn in range(turns):
        context.record_reply([40 + turn, MODEL.end_id], [-1.0, -2.0], policy_version=0)
        context.observe([MODEL.tool_result("more")])
    tokens = context.segments()[0].tokens
    assert int(response_mask(tokens, TABLE).sum()) == 2 * turns
    assert np.isfinite(tokens.behavior_log_probs[response_mask(tokens, TABLE)]).all()
    trained = tokens.token_ids[loss_mask(tokens, TABLE)].tolist()
    return [40 + turn in trained for turn in range(turns)]


@pytest.mark.parametrize(
    ("control", "expected"),
    [
        (TrainingControl(), [True, True, True, True]),
        (TrainingControl(keep_turns=(0, 2)), [True, False, True, False]),
        (TrainingControl(keep_turns=(-1,)), [False, False, False, True]),
        (TrainingControl(keep_turns=()), [False, False, False, False]),
        (TrainingControl(discard_turns=(1, -1)), [True, False, True, False]),
        (TrainingControl(keep_turns=(0, 1), discard_turns=(-4,)), [False, True, False, False]),
        (TrainingControl(keep_turns=(9, -9)), [False, False, False, False]),
    ],
)
def test_turns_are_named_from_both_ends(control: TrainingControl, expected: list[bool]) -> None:
    assert trained_turns(control) == expected


def recorded(control: TrainingControl, ids: list[int], log_prob: float = -1.0) -> list[bool]:
    context = ContextManager(MODEL.renderer(), choose_parser("hermes", ""), max_tokens=4000, control=control)
    context.begin([Message("user", "go")], ())
    before = len(context.prompt_ids)
    context.record_reply(ids, [log_prob] * len(ids), policy_version=0)
    return loss_mask(context.segments()[0].tokens, TABLE)[before:].tolist()


def test_blackout_takes_the_first_occurrence_of_each_sequence() -> None:
    open_call = MODEL.codec.encode("<tool_call>\n")
    assert len(open_call) == 2  # the control token, the line break
    ids = [50, *open_call, 51, *open_call, MODEL.end_id]
    control = TrainingControl(blackout=("<tool_call>\n", "<|im_start|>"))
    assert recorded(control, ids) == [True, False, False, True, True, True, True]


def test_blackout_after_end_spares_the_end_itself() -> None:
    ids = [50, MODEL.end_id, 51, MODEL.end_id]
    assert recorded(TrainingControl(), ids) == [True, True, False, False]
    assert recorded(TrainingControl(blackout_after_end=False), ids) == [True, True, True, True]
    assert recorded(TrainingControl(), [50, 51]) == [True, True]


def test_blackout_finds_a_text_however_it_was_sampled() -> None:
    codec = MODEL.codec
    (joined,) = codec.encode_text("pearl")
    letters = [token for letter in "pearl" for token in codec.encode_text(letter)]
    assert len(letters) == 5
    control = TrainingControl(blackout=("pearl",))
    assert recorded(control, [40, *letters, 41]) == [True, *[False] * 5, True]
    assert recorded(control, [40, joined, *letters]) == [True, False, *[True] * 5]


def test_blackout_takes_the_tokens_that_overlap_a_text() -> None:
    (joined,) = MODEL.codec.encode_text("pearl")
    assert recorded(TrainingControl(blackout=("ear",)), [40, joined, 41]) == [True, False, True]
    letters = [token for letter in "é!" for token in MODEL.codec.encode_text(letter)]
    assert len(letters) == 3  # two bytes of the first
    assert recorded(TrainingControl(blackout=("é",)), letters) == [False, False, True]
    assert recorded(TrainingControl(blackout=("!",)), letters) == [True, True, False]


def test_empty_blackout_text_is_refused() -> None:
    with pytest.raises(ValueError, match="blackout must hold texts of at least one character, got ''"):
        TrainingControl(blackout=("<think>", ""))


def test_withheld_demonstration_has_no_log_probs_and_no_policy_for_them() -> None:
    for control, name in ((TrainingControl(), DEMONSTRATION), (TrainingControl(()), discarded(DEMONSTRATION))):
        context = ContextManager(MODEL.renderer(), choose_parser("hermes", ""), max_tokens=4000, control=control)
        context.begin([Message("user", "go")], ())
        reply = context.record_reply([50, MODEL.end_id], [math.nan] * 2, policy_version=0)
        tokens = context.segments()[0].tokens
        assert reply.message.author == DEMONSTRATION
        assert tokens.authors[-2:].tolist() == [TABLE.code(name)] * 2
        assert not TABLE.has_behavior(tokens.authors).any()
        assert loss_mask(tokens, TABLE).sum() == (2 if name == DEMONSTRATION else 0)
        assert response_mask(tokens, TABLE).sum() == 2


def test_table_says_who_is_sampled_trained_shown_and_known() -> None:
    codes = np.array(
        [TABLE.code(name) for name in ("user", LLM, LLM_DO_NOT_TRAIN, "demonstration", "history")], np.uint8
    )
    assert TABLE.is_action(codes).tolist() == [False, True, True, True, False]
    assert TABLE.is_trained(codes).tolist() == [False, True, False, True, False]
    assert TABLE.has_behavior(codes).tolist() == [False, True, True, False, False]
    assert all(author.shown for author in TABLE.authors)
    hidden = TABLE.author("demonstration(discard)")
    assert (hidden.action, hidden.trained, hidden.shown, hidden.behavior) == (True, False, False, False)


def test_table_with_registered_authors_reads_back_from_json() -> None:
    extra = (Author("judge", False, False, shown=False), Author("subagent:planner", True, True))
    table = AuthorTable([*TABLE.authors, *extra])
    assert AuthorTable.from_json(table.to_json()).authors == table.authors
    assert AuthorTable.from_json(table.to_json()).hash == table.hash != TABLE.hash


@pytest.mark.parametrize("field", ["trained", "behavior"])
def test_author_that_does_not_act_can_not_be_trained_or_known(field: str) -> None:
    with pytest.raises(ValueError, match=f"authors.x must be an action author for {field}=True"):
        Author("x", action=False, **{"trained": False, field: True})
