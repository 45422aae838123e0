from __future__ import annotations

import numpy as np

from agentloop.training.mixed_batch import as_observed
from context.authors import Author, AuthorTable
from context.tokens.token_sequence import Segment, TokenSequence, loss_mask, response_mask
from tests.fakes.records import AUTHORS, SHORT, tokens, trajectory


def test_observed_tokens_are_sampled_and_carry_no_loss() -> None:
    given = trajectory("a", segments=(Segment(SHORT), Segment(tokens([1, 2], ["llm(discard)", "llm"]), "clipped")))
    observed = as_observed(given, AUTHORS)
    for mine, theirs in zip(observed.segments, given.segments, strict=True):
        assert response_mask(mine.tokens, AUTHORS).tolist() == response_mask(theirs.tokens, AUTHORS).tolist()
        assert not loss_mask(mine.tokens, AUTHORS).any()
        assert mine.tokens.token_ids.tolist() == theirs.tokens.token_ids.tolist()
        assert np.array_equal(mine.tokens.behavior_log_probs, theirs.tokens.behavior_log_probs, equal_nan=True)
        assert mine.reason == theirs.reason
    names = [AUTHORS.name(code) for code in observed.segments[0].tokens.authors.tolist()]
    assert names == ["template", "user", "llm(do_not_train)", "llm(do_not_train)", "env", "llm(do_not_train)"]
    assert [AUTHORS.name(code) for code in given.segments[0].tokens.authors.tolist()][2] == "llm"


def test_observed_demonstration_keeps_its_response_mask_and_its_unknown_log_probs() -> None:
    edited = Author("human_edit", action=True, trained=True, behavior=False)
    table = AuthorTable([*AUTHORS.authors, edited])
    code = table.code("human_edit")
    spoken = TokenSequence.concatenate([SHORT, TokenSequence.constant([1, 2, 3], code)])
    observed = as_observed(trajectory("a", segments=(Segment(spoken),)), table).segments[0].tokens
    assert response_mask(observed, table).tolist() == [False, False, True, True, False, True, True, True, True]
    assert not loss_mask(observed, table).any()
    assert np.isnan(observed.behavior_log_probs[6:]).all()
