import math

import numpy as np
import pytest

from context import ContextManager, Message, choose_parser, loss_mask, response_mask
from context.authors import DEMONSTRATION, Author, AuthorTable, default_authors, discarded
from context.tokens.loss_mask import TrainingControl
from tests.fakes.families import family

MODEL = family("chatml")
TABLE = default_authors()


def begun(control: TrainingControl) -> ContextManager:
    context = ContextManager(MODEL.renderer(), choose_parser("hermes", ""), max_tokens=4000, control=control)
    context.begin([Message("user", "go")], ())
    return context


def trained_turns(control: TrainingControl, turns: int = 4) -> list[bool]:
    context = begun(control)
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


def letters(text: str) -> list[int]:
    return [token for letter in text for token in MODEL.codec.encode_text(letter)]


END = MODEL.end_id
OPEN_CALL = MODEL.codec.encode("<tool_call>\n")  # the control token, the line break
(PEARL,) = MODEL.codec.encode_text("pearl")


@pytest.mark.parametrize(
    ("control", "ids", "withheld"),
    [
        # The first occurrence of each text.
        (TrainingControl(blackout=("<tool_call>\n", "<|im_start|>")), [50, *OPEN_CALL, 51, *OPEN_CALL, END], {1, 2}),
        # However it was sampled.
        (TrainingControl(blackout=("pearl",)), [40, *letters("pearl"), 41], {1, 2, 3, 4, 5}),
        (TrainingControl(blackout=("pearl",)), [40, PEARL, *letters("pearl")], {1}),
        # All tokens that overlap it.
        (TrainingControl(blackout=("ear",)), [40, PEARL, 41], {1}),
        (TrainingControl(blackout=("é",)), letters("é!"), {0, 1}),
        (TrainingControl(blackout=("!",)), letters("é!"), {2}),
        # Nothing behind the stop token, which is trained itself.
        (TrainingControl(), [50, END, 51, END], {2, 3}),
        (TrainingControl(), [50, 51], set()),
        (TrainingControl(blackout_after_end=False), [50, END, 51, END], set()),
    ],
)
def test_blackout_withholds_texts_and_the_rest(control: TrainingControl, ids: list[int], withheld: set[int]) -> None:
    context = begun(control)
    before = len(context.prompt_ids)
    context.record_reply(ids, [-1.0] * len(ids), policy_version=0)
    trained = loss_mask(context.segments()[0].tokens, TABLE)[before:].tolist()
    assert trained == [place not in withheld for place in range(len(ids))]


def test_withheld_demonstration_has_no_log_probs_and_no_policy_for_them() -> None:
    for control, name in ((TrainingControl(), DEMONSTRATION), (TrainingControl(()), discarded(DEMONSTRATION))):
        context = begun(control)
        reply = context.record_reply([50, MODEL.end_id], [math.nan] * 2, policy_version=0)
        tokens = context.segments()[0].tokens
        assert reply.message.author == DEMONSTRATION
        assert tokens.authors[-2:].tolist() == [TABLE.code(name)] * 2
        assert not TABLE.has_behavior(tokens.authors).any()
        assert loss_mask(tokens, TABLE).sum() == (2 if name == DEMONSTRATION else 0)
        assert response_mask(tokens, TABLE).sum() == 2


def test_table_with_registered_authors_reads_back_from_json() -> None:
    extra = (Author("judge", False, False, shown=False), Author("subagent:planner", True, True))
    table = AuthorTable([*TABLE.authors, *extra])
    assert AuthorTable.from_json(table.to_json()).authors == table.authors
    assert AuthorTable.from_json(table.to_json()).hash == table.hash != TABLE.hash


@pytest.mark.parametrize("field", ["trained", "behavior"])
def test_author_that_does_not_act_can_not_be_trained_or_known(field: str) -> None:
    with pytest.raises(ValueError, match=f"authors.x must be an action author for {field}=True"):
        Author("x", action=False, **{"trained": False, field: True})
