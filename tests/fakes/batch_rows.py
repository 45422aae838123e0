"""Hand-made trajectories for tests of the update."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from context.tokens.token_sequence import Segment, TokenSequence
from replay.records import BatchRow, DrawRecord, Trajectory
from tests.fakes.records import AUTHORS, RUN, trajectory

VOCABULARY = 23
_CODES = {"u": "user", "e": "env", "l": "llm", "d": "llm(do_not_train)", "x": "demonstration"}


def segment(authors: str, log_probs: Sequence[float] = (), *, seed: int = 0) -> Segment:
    """Random tokens, a letter each: user, env, llm, do_not_train, demonstration (x); `log_probs` of sampled ones."""
    rng = np.random.default_rng(seed)
    codes = np.array([AUTHORS.code(_CODES[letter]) for letter in authors], np.uint8)
    action = AUTHORS.has_behavior(codes)
    behavior = np.full(len(authors), np.nan, np.float32)
    behavior[action] = log_probs if len(log_probs) else rng.uniform(-4.0, -1.0, int(action.sum()))
    ids = rng.integers(0, VOCABULARY, len(authors)).astype(np.int32)
    return Segment(TokenSequence(ids, codes, behavior, np.where(action, 0, -1).astype(np.int32)))


def row(
    id: str, *parts: Segment, advantage: float = 1.0, stream: Any = "fresh", group: str = "g", temperature: float = 1.0
) -> BatchRow:
    made = trajectory(
        id,
        segments=parts,
        messages=(),
        group=group,
        advantage=advantage,
        temperature=temperature,
        num_tokens=sum(len(s.tokens) for s in parts),
        num_action_tokens=1,
        policy_version_min=0,
        policy_version_max=0,
        mean_behavior_log_prob=-1.0,
        min_behavior_log_prob=-1.0,
    )
    return batch_row(made, stream, advantage=advantage)


def batch_row(trajectory: Trajectory, stream: str = "fresh", *, staleness: int | None = None, **more: Any) -> BatchRow:
    """A row of a batch of the second iteration."""
    draw = DrawRecord(RUN, 2, 0, trajectory.id, stream, probability=None, staleness=staleness)
    return BatchRow(trajectory, draw, **more)


def ragged(*, fresh: int = 6, replayed: int = 3) -> list[BatchRow]:
    """Ragged rows of both streams: groups of three, two-segment trajectories, zero and unequal advantages."""
    rng = np.random.default_rng(7)
    rows = []
    for index in range(fresh + replayed):
        parts = [
            segment(
                "u" * int(rng.integers(1, 5)) + "l" * int(rng.integers(1, 6)) + "ee" + "l" * int(rng.integers(1, 4)),
                seed=100 * index + part,
            )
            for part in range(1 + index % 2)
        ]
        is_fresh = index < fresh
        rows.append(
            row(
                f"t{index}",
                *parts,
                advantage=[0.5, -1.25, 0.0, 1.0][index % 4],
                stream="fresh" if is_fresh else "replay",
                group=f"g{index // 3}" if is_fresh else f"old{index}",
                temperature=1.0 if is_fresh else 0.8,
            )
        )
    return rows


def stored_off_by(item: BatchRow, nats: float) -> BatchRow:
    """A row as a generator stores it whose log-probs are wrong by so much."""
    stored = (part.tokens.behavior_log_probs for part in item.trajectory.segments)
    return with_log_probs(item, [log_probs + np.float32(nats) for log_probs in stored])


def with_log_probs(item: BatchRow, log_probs: Sequence[Any]) -> BatchRow:
    """The same tokens with these behavior log-probs, an array for each segment."""
    parts = tuple(
        replace(part, tokens=replace(part.tokens, behavior_log_probs=np.asarray(values, np.float32)))
        for part, values in zip(item.trajectory.segments, log_probs, strict=True)
    )
    return replace(item, trajectory=replace(item.trajectory, segments=parts))
