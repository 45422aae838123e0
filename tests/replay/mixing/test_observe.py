from __future__ import annotations

import numpy as np

from agentloop.training.mixed_batch import as_observed
from context.authors import Author, AuthorTable
from context.tokens.token_sequence import Segment, TokenSequence, loss_mask, response_mask
from tests.fakes.records import AUTHORS, SHORT, tokens, trajectory

EDITED = AuthorTable([*AUTHORS.authors, Author("human_edit", action=True, trained=True, behavior=False)])


def test_observed_tokens_stay_actions_with_their_log_probs_and_carry_no_loss() -> None:
    demonstrated = TokenSequence.concatenate([SHORT, TokenSequence.constant([1, 2, 3], EDITED.code("human_edit"))])
    cut = Segment(tokens([1, 2], ["llm(discard)", "llm"]), "clipped")
    given = trajectory("a", segments=(Segment(SHORT), cut, Segment(demonstrated)))
    observed = as_observed(given, EDITED)
    for mine, theirs in zip(observed.segments, given.segments, strict=True):
        assert response_mask(mine.tokens, EDITED).tolist() == response_mask(theirs.tokens, EDITED).tolist()
        assert not loss_mask(mine.tokens, EDITED).any()
        assert mine.tokens.token_ids.tolist() == theirs.tokens.token_ids.tolist()
        assert np.array_equal(mine.tokens.behavior_log_probs, theirs.tokens.behavior_log_probs, equal_nan=True)
        assert mine.reason == theirs.reason
    names = [EDITED.name(code) for code in observed.segments[0].tokens.authors.tolist()]
    assert names == ["template", "user", "llm(do_not_train)", "llm(do_not_train)", "env", "llm(do_not_train)"]
    assert EDITED.name(int(given.segments[0].tokens.authors[2])) == "llm"
