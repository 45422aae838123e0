"""What may enter the buffer. Everything is checked before anything is written, and every error names its field.

Tokens are checked all at once: one trajectory after another takes longer than storing them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model

from context.authors import AuthorTable
from context.tokens.token_sequence import Segment
from replay.errors import InvalidRecord, first_problem
from replay.records import ELIGIBLE, UNTRAINABLE, Trajectory
from replay.storage.format.column_types import column_types
from replay.storage.format.encoding import content_hash
from replay.storage.format.token_summary import JoinedTokens, joined, summaries

_ROUNDING = 1e-6
"""A log-prob this far above 0 is a rounding error of softmax; beyond it, it is no log-prob."""
NOTHING_STORED = " Nothing of this call was stored."
"""How the text of an `InvalidRecord` ends."""


@dataclass(frozen=True)
class Validated:
    """What the store keeps of a trajectory besides its messages."""

    row: dict[str, Any]
    """Its record, with what follows from its tokens filled in."""
    segments: tuple[Segment, ...]
    """With log-probs clipped to 0."""
    clipped: int
    """Log-probs that rounding had put above 0."""


@cache
def _adapter(record: type) -> TypeAdapter[Any]:
    config = ConfigDict(strict=True, from_attributes=True)
    types: dict[str, Any] = {name: (kind, ...) for name, kind in column_types(record).items()}
    columns: Any = create_model(record.__name__, __config__=config, **types)
    return TypeAdapter(list[columns])


def checked(records: Sequence[Any], kind: str, key: str) -> list[dict[str, Any]]:
    """The columns of records of one class, each of the type it is annotated with.

    Raises InvalidRecord naming the field, and the record by `kind` and its field `key`. A NumPy scalar becomes the
    number it is, or is refused: a driver would store it as bytes without a word.
    """
    if not records:
        return []
    try:
        return [dict(vars(found)) for found in _adapter(records[0].__class__).validate_python(list(records))]
    except ValidationError as error:
        (index, *place), rule, shown = first_problem(error)
        problem = f"{'.'.join(map(str, place))} must {rule}, got {shown}"
        raise InvalidRecord(f"{problem} in {kind} {getattr(records[int(index)], key)}.{NOTHING_STORED}") from None


def refused(field: str, rule: str, value: object, where: str) -> InvalidRecord:
    return InvalidRecord(f"{field} must {rule}, got {value!r} in {where}.{NOTHING_STORED}")


def validate(trajectories: Sequence[Trajectory], authors: AuthorTable) -> list[Validated]:
    """Check trajectories of one run against themselves and the run's author table; raises InvalidRecord."""
    if not trajectories:
        return []
    for trajectory in trajectories:
        if not any(len(segment.tokens) for segment in trajectory.segments):
            raise refused("segments", "hold at least one token", 0, f"trajectory {trajectory.id}")
    tokens = joined(trajectories, authors)
    _check_tokens(tokens, authors, trajectories)
    rows = checked([trajectory.record for trajectory in trajectories], "trajectory", "id")
    trained = np.logical_or.reduceat(authors.is_trained(tokens.sequence.authors), tokens.starts).tolist()
    clipped = np.add.reduceat(tokens.sequence.behavior_log_probs > 0, tokens.starts, dtype=np.int64).tolist()
    found = zip(trajectories, rows, summaries(tokens), tokens.starts, trained, clipped, strict=True)
    return [
        _validated(trajectory, row | facts, tokens.log_probs[start:], is_trained, count)
        for trajectory, row, facts, start, is_trained, count in found
    ]


def _check_tokens(tokens: JoinedTokens, authors: AuthorTable, trajectories: Sequence[Trajectory]) -> None:
    """Arrays of unequal length can't be here: TokenSequence refuses them."""
    given, behavior = tokens.sequence, tokens.behavior
    values, versions = given.behavior_log_probs, given.policy_versions
    is_log_prob = (values <= _ROUNDING) & (values > -np.inf)
    unknown = np.isnan(values)
    rules = (
        ("token_ids", "be >= 0", given.token_ids >= 0),
        ("authors", "be a code of the run's author table", authors.is_known(given.authors)),
        ("behavior_log_probs", "be finite and at most 0 for a sampled token", ~behavior | is_log_prob),
        ("behavior_log_probs", "be NaN for a token that was not sampled", tokens.action | unknown),
        ("behavior_log_probs", "be NaN where no behavior policy is known", behavior | unknown),
        ("policy_versions", "be >= 0 for a sampled token and -1 for others", tokens.sampled == (versions >= 0)),
        ("policy_versions", "be >= 0 for a sampled token and -1 for others", versions >= -1),
    )
    for field, rule, good in rules:
        if not good.all():
            at = int(np.argmin(good))
            trajectory, segment, offset = _place(trajectories, at)
            value = getattr(given, field)[at].item()
            raise refused(f"segments[{segment}].{field}[{offset}]", rule, value, f"trajectory {trajectory.id}")


def _place(trajectories: Sequence[Trajectory], at: int) -> tuple[Trajectory, int, int]:
    """Which segment of which trajectory the token at `at` of all of them belongs to, and its position there."""
    for trajectory in trajectories:
        for index, segment in enumerate(trajectory.segments):
            if at < len(segment.tokens):
                return trajectory, index, at
            at -= len(segment.tokens)
    raise IndexError(at)


def _validated(
    trajectory: Trajectory, row: dict[str, Any], log_probs: npt.NDArray[np.float32], trained: bool, clipped: int
) -> Validated:
    where = f"trajectory {trajectory.id}"
    segments = tuple(_with_log_probs(trajectory.segments, log_probs))
    digest = content_hash(segments)
    if row["content_hash"] not in ("", digest):
        raise refused("content_hash", f"be that of the tokens ({digest})", row["content_hash"], where)
    state = ELIGIBLE if trained else UNTRAINABLE
    if row["state"] not in (ELIGIBLE, state):
        raise refused("state", f"be {state!r} for a new row with these tokens", row["state"], where)
    return Validated({**row, "content_hash": digest, "state": state}, segments, clipped)


def _with_log_probs(segments: Sequence[Segment], log_probs: npt.NDArray[np.float32]) -> Iterator[Segment]:
    """`log_probs` begin with those of the segments."""
    end = 0
    for segment in segments:
        start, end = end, end + len(segment.tokens)
        yield replace(segment, tokens=replace(segment.tokens, behavior_log_probs=log_probs[start:end]))
