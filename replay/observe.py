"""Replayed rows that are measured and never trained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from context.authors import LLM_DO_NOT_TRAIN, AuthorTable
from replay.records import Trajectory


def as_observed(trajectory: Trajectory, authors: AuthorTable) -> Trajectory:
    """The same tokens with every trained one written by `llm(do_not_train)`: sampled, scored, without loss."""
    code = np.uint8(authors.code(LLM_DO_NOT_TRAIN))
    segments = []
    for segment in trajectory.segments:
        tokens = segment.tokens
        codes = np.where(authors.is_trained(tokens.authors), code, tokens.authors)
        segments.append(replace(segment, tokens=replace(tokens, authors=codes)))
    return replace(trajectory, segments=tuple(segments))
