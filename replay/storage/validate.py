"""Checks of everything that enters the buffer, before anything is written. Every error names its field. Numbers that
follow from tokens are computed here, for all rows at once: one row at a time takes longer than storing it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model

from context.authors import AuthorTable
from context.tokens.session_segments import segments_of
from context.tokens.token_sequence import NOT_SAMPLED, Segment, TokenSequence
from replay.errors import InvalidRecord, first_problem
from replay.records import ELIGIBLE, UNTRAINABLE, Trajectory
from replay.storage.format.column_types import column_types
from replay.storage.format.encoding import content_hash

_ROUNDING = 1e-6
"""A log-prob up to this far above 0 is a rounding error of softmax; a greater number is no log-prob."""
NOTHING_STORED = " Nothing of this call was stored."
"""The end of the message of every `InvalidRecord`."""
SUMMARY = (
    *("num_tokens", "num_action_tokens", "longest_segment", "policy_version_min", "policy_version_max"),
    *("mean_behavior_log_prob", "min_behavior_log_prob"),
)
"""Fields of `TrajectoryRecord` that follow from the tokens."""


@cache
def _adapter(record: type) -> TypeAdapter[Any]:
    config = ConfigDict(strict=True, from_attributes=True)
    types: dict[str, Any] = {name: (kind, ...) for name, kind in column_types(record).items()}
    columns: Any = create_model(record.__name__, __config__=config, **types)
    return TypeAdapter(list[columns])


def checked(records: Sequence[Any], kind: str, key: str) -> list[dict[str, Any]]:
    """The columns of records of one class, each checked by its annotation. NumPy scalars are refused, for a driver
    would store their bytes. Raises InvalidRecord naming the field, and the record by `kind` and its field `key`."""
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


@dataclass(frozen=True)
class _Joined:
    """The tokens of several trajectories, one after another."""

    sequence: TokenSequence
    action: npt.NDArray[np.bool_]
    sampled: npt.NDArray[np.bool_]
    """True = sampled by a policy of the run; other action tokens were written in its place."""
    behavior: npt.NDArray[np.bool_]
    """True = the token's behavior log-prob is known."""
    log_probs: npt.NDArray[np.float32]
    """Known behavior log-probs, at most 0; NaN for other tokens."""
    starts: list[int]
    """The position of each trajectory's first token; each has at least one."""
    longest: list[int]
    """The number of tokens of each trajectory's longest segment."""


def _joined(trajectories: Sequence[Trajectory], authors: AuthorTable) -> _Joined:
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    tokens = TokenSequence.concatenate(segment.tokens for segment in segments)
    # Hinted or relabelled segments were sampled in another context than the stored one.
    plain = np.repeat([s.behavior_context == "plain" for s in segments], [len(s.tokens) for s in segments])
    sampled = authors.has_behavior(tokens.authors)
    behavior = sampled & plain
    log_probs = np.where(behavior, np.minimum(tokens.behavior_log_probs, np.float32(0.0)), np.float32(np.nan))
    lengths = [[len(segment.tokens) for segment in trajectory.segments] for trajectory in trajectories]
    starts, longest = [0, *accumulate(map(sum, lengths[:-1]))], [max(each, default=0) for each in lengths]
    return _Joined(tokens, authors.is_action(tokens.authors), sampled, behavior, log_probs, starts, longest)


def _summaries(tokens: _Joined) -> list[dict[str, Any]]:
    """The fields of `SUMMARY` of each trajectory, by name. Policy versions are left out if no token was sampled."""
    starts, versions = tokens.starts, tokens.sequence.policy_versions
    totals = np.add.reduceat(np.where(tokens.behavior, tokens.log_probs, np.float32(0.0)), starts, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        means = totals / np.add.reduceat(tokens.behavior, starts, dtype=np.int64)
    columns = (
        np.diff([*starts, len(tokens.sequence)]),
        np.add.reduceat(tokens.action, starts, dtype=np.int64),
        np.array(tokens.longest),
        np.minimum.reduceat(np.where(tokens.sampled, versions, np.iinfo(np.int32).max), starts),
        np.maximum.reduceat(np.where(tokens.sampled, versions, NOT_SAMPLED), starts),
        means,
        np.fmin.reduceat(tokens.log_probs, starts),
    )
    found = [dict(zip(SUMMARY, facts, strict=True)) for facts in zip(*(c.tolist() for c in columns), strict=True)]
    for facts in found:
        if facts["policy_version_max"] == NOT_SAMPLED:
            del facts["policy_version_min"], facts["policy_version_max"]
    return found


def summarised(trajectories: Sequence[Trajectory], authors: AuthorTable) -> list[Trajectory]:
    """The trajectories with the records that the store gives them; each has at least one token."""
    found = zip(trajectories, _summaries(_joined(trajectories, authors)), strict=True) if trajectories else ()
    return [replace(row, record=replace(row.record, **facts)) for row, facts in found]


def validate(
    trajectories: Sequence[Trajectory], authors: AuthorTable, vocab_size: int | None = None
) -> list[tuple[dict[str, Any], tuple[Segment, ...]]]:
    """The complete record and the segments of each trajectory of one run. Log-probs of the segments are at most 0.

    Raises InvalidRecord for a trajectory that contradicts itself, or the run's author table or vocabulary.
    """
    if not trajectories:
        return []
    for trajectory in trajectories:
        if not any(len(segment.tokens) for segment in trajectory.segments):
            raise refused("segments", "hold at least one token", 0, f"trajectory {trajectory.id}")
    tokens = _joined(trajectories, authors)
    _check_tokens(tokens, authors, vocab_size, trajectories)
    rows = checked([trajectory.record for trajectory in trajectories], "trajectory", "id")
    trained = np.logical_or.reduceat(authors.is_trained(tokens.sequence.authors), tokens.starts).tolist()
    found = zip(trajectories, rows, _summaries(tokens), tokens.starts, trained, strict=True)
    return [
        _validated(trajectory, row | facts, tokens.log_probs[start:], is_trained)
        for trajectory, row, facts, start, is_trained in found
    ]


def with_segments(row: Trajectory, authors: AuthorTable, vocab_size: int | None) -> Trajectory:
    """A session's row with the segments that follow from its nodes. Log-probs of all nodes become at most 0, even of
    nodes in no segment. Raises InvalidRecord for a row that contradicts the run's author table or vocabulary."""
    whole = replace(row, segments=tuple(Segment(node.tokens) for node in row.nodes))
    tokens = _joined([whole], authors)
    _check_tokens(tokens, authors, vocab_size, [whole], parts="nodes")
    checked = zip(row.nodes, _with_log_probs(whole.segments, tokens.log_probs), strict=True)
    nodes = tuple(replace(node, tokens=part.tokens) for node, part in checked)
    return replace(row, nodes=nodes, segments=segments_of(nodes, authors))


def _check_tokens(
    tokens: _Joined,
    authors: AuthorTable,
    vocab_size: int | None,
    trajectories: Sequence[Trajectory],
    *,
    parts: str = "segments",
) -> None:
    """Raises InvalidRecord for the first wrong token. TokenSequence has refused arrays of unequal length before."""
    given, behavior = tokens.sequence, tokens.behavior
    values, versions = given.behavior_log_probs, given.policy_versions
    is_log_prob = (values <= _ROUNDING) & (values > -np.inf)
    unknown = np.isnan(values)
    known = given.token_ids < (1 << 31 if vocab_size is None else vocab_size)
    rules = (
        ("token_ids", "be >= 0", given.token_ids >= 0),
        ("token_ids", f"be below {vocab_size}, the size of its run's vocabulary", known),
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
            raise refused(f"{parts}[{segment}].{field}[{offset}]", rule, value, f"trajectory {trajectory.id}")


def _place(trajectories: Sequence[Trajectory], at: int) -> tuple[Trajectory, int, int]:
    """The trajectory, the segment, and the position in it, of the token at position `at` of all trajectories."""
    for trajectory in trajectories:
        for index, segment in enumerate(trajectory.segments):
            if at < len(segment.tokens):
                return trajectory, index, at
            at -= len(segment.tokens)
    raise IndexError(at)


def _validated(
    trajectory: Trajectory, row: dict[str, Any], log_probs: npt.NDArray[np.float32], trained: bool
) -> tuple[dict[str, Any], tuple[Segment, ...]]:
    where = f"trajectory {trajectory.id}"
    segments = tuple(_with_log_probs(trajectory.segments, log_probs))
    digest = content_hash(segments)
    if row["content_hash"] not in ("", digest):
        raise refused("content_hash", f"be that of the tokens ({digest})", row["content_hash"], where)
    state = ELIGIBLE if trained else UNTRAINABLE
    if row["state"] not in (ELIGIBLE, state):
        raise refused("state", f"be {state!r} for a new row with these tokens", row["state"], where)
    return {**row, "content_hash": digest, "state": state}, segments


def _with_log_probs(segments: Sequence[Segment], log_probs: npt.NDArray[np.float32]) -> Iterator[Segment]:
    """The segments with the first of `log_probs` as their own."""
    end = 0
    for segment in segments:
        start, end = end, end + len(segment.tokens)
        yield replace(segment, tokens=replace(segment.tokens, behavior_log_probs=log_probs[start:end]))
