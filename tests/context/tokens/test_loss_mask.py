import math

import numpy as np
import pytest

from context import ContextManager, Message, choose_parser, loss_mask, response_mask
from context.authors import DEMONSTRATION, Author, AuthorTable, default_authors, discarded
from tests.fakes.families import family

MODEL = family("chatml")
TABLE = default_authors()


def begun(*untrained: int) -> ContextManager:
    parser = choose_parser("hermes", "")
    context = ContextManager(MODEL.renderer(), parser, max_tokens=4000, untrained_turns=untrained)
    context.begin([Message("user", "go")], ())
    return context


def test_untrained_turns_stay_sampled_with_their_log_probs() -> None:
    context = begun(1, 2)
    for turn in range(4):
        context.record_reply([40 + turn, MODEL.end_id], [-1.0, -2.0], policy_version=0)
        context.observe([MODEL.tool_result("more")])
    tokens = context.segments()[0].tokens
    assert int(response_mask(tokens, TABLE).sum()) == 8
    assert np.isfinite(tokens.behavior_log_probs[response_mask(tokens, TABLE)]).all()
    assert tokens.token_ids[loss_mask(tokens, TABLE)].tolist() == [40, MODEL.end_id, 43, MODEL.end_id]


@pytest.mark.parametrize(
    ("ids", "trained"),
    [([50, MODEL.end_id, 51, MODEL.end_id], [True, True, False, False]), ([50, 51], [True, True])],
)
def test_nothing_behind_the_first_stop_token_is_trained(ids: list[int], trained: list[bool]) -> None:
    context = begun()
    before = len(context.prompt_ids)
    context.record_reply(ids, [-1.0] * len(ids), policy_version=0)
    assert loss_mask(context.segments()[0].tokens, TABLE)[before:].tolist() == trained


def test_withheld_demonstration_has_no_log_probs_and_no_policy_for_them() -> None:
    for untrained, name in (((), DEMONSTRATION), ((0,), discarded(DEMONSTRATION))):
        context = begun(*untrained)
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
