"""What may enter the buffer. Everything is checked before anything is written, and every error names its field.

Records are checked a column at a time and tokens all at once: one by one takes longer than storing them.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from context.authors import AuthorTable
from context.tokens.token_sequence import Segment, TokenSequence
from replay.errors import InvalidRecord
from replay.records import ELIGIBLE, UNTRAINABLE, GroupRecord, Trajectory, TrajectoryRecord
from replay.storage.format.encoding import content_hash

_ROUNDING = 1e-6
"""A log-prob this far above 0 is a rounding error of softmax; beyond it, it is no log-prob."""
_AGREEMENT = 1e-3
_MAY_BE_NAN = ("mean_behavior_log_prob", "min_behavior_log_prob")
_SUMMARY = ("num_tokens", "num_action_tokens", "policy_version_min", "policy_version_max", *_MAY_BE_NAN)


SOURCE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
"""What a set of rows may be called, in `--name`, `replay.attach` and `TrajectoryRecord.source`."""


_Keeps = Callable[[Any], bool]


@dataclass(frozen=True)
class Validated:
    """What the store keeps of a trajectory besides its record and its messages."""

    segments: tuple[Segment, ...]
    """With log-probs clipped to 0."""
    content_hash: str
    state: str
    clipped: int
    """Log-probs that rounding had put above 0."""


def check_fields(records: Sequence[Any], kind: str, key: str) -> None:
    """Every column of the type it is declared as: a driver stores NumPy scalars as bytes without a word.

    Whole numbers count something: none is negative. Real numbers are finite. Records are of one class; an error
    names the one it is about by `kind` and its field `key`.
    """
    for name, rules in _rules(records[0].__class__) if records else ():
        column = [getattr(record, name) for record in records]
        for rule, keeps in rules:
            if not all(map(keeps, column)):
                at = [bool(keeps(value)) for value in column].index(False)
                raise refused(name, rule, column[at], f"{kind} {getattr(records[at], key)}")


@cache
def _rules(record_type: type) -> list[tuple[str, list[tuple[str, _Keeps]]]]:
    """By name, for the fields that are one column."""
    found = []
    for field in fields(record_type):
        declared, _, optional = str(field.type).partition(" | ")
        keeps_type = _TYPES.get(declared)
        if keeps_type is None:
            continue
        rules = [(f"be of type {declared}", keeps_type)]
        if declared == "int":
            rules.append(("be >= 0 and below 2^31", _is_count))
        elif declared == "float":
            rules.append(("be finite", _is_finite_or_nan if field.name in _MAY_BE_NAN else _is_finite))
        if field.name in _FURTHER:
            rules.append(_FURTHER[field.name])
        found.append((field.name, [(rule, _unless_none(keeps) if optional else keeps) for rule, keeps in rules]))
    return found


_TYPES: dict[str, _Keeps] = {
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, (float, int)) and not isinstance(value, bool),
}


def _is_count(value: int) -> bool:
    return 0 <= value < 2**31


def _is_finite(value: float) -> bool:
    return abs(value) <= sys.float_info.max


def _is_finite_or_nan(value: float) -> bool:
    return abs(value) <= sys.float_info.max or value != value


_not_negative = ("be >= 0", lambda value: value >= 0)
_share = ("be between 0 and 1", lambda value: 0 <= value <= 1)
_FURTHER: dict[str, tuple[str, _Keeps]] = {
    "id": ("be a text of at least one character", bool),
    "reward_std": _not_negative,
    "temperature": _not_negative,
    "top_p": _share,
    "success_rate": _share,
    "source": (f"match {SOURCE_NAME.pattern}", lambda value: bool(SOURCE_NAME.fullmatch(value))),
}
"""By the name of the field, whatever record it is of."""


def _unless_none(keeps: _Keeps) -> _Keeps:
    return lambda value: value is None or keeps(value)


def refused(field: str, rule: str, value: object, where: str) -> InvalidRecord:
    return InvalidRecord(f"{field} must {rule}, got {value!r} in {where}. Nothing of this call was stored.")


def check_groups(groups: Sequence[GroupRecord]) -> None:
    check_fields(groups, "group", "id")
    for group in groups:
        if group.size < 1:
            raise refused("size", "be at least 1", group.size, f"group {group.id}")


@dataclass(frozen=True)
class _Tokens:
    """Those of all trajectories, one after another."""

    sequence: TokenSequence
    action: npt.NDArray[np.bool_]
    sampled: npt.NDArray[np.bool_]
    """True = by a policy of the run; other action tokens were written in its place."""
    behavior: npt.NDArray[np.bool_]
    """True = comes with the log-prob it was sampled with."""
    starts: list[int]
    """Of each trajectory, which has at least one token."""


def validate(trajectories: Sequence[Trajectory], authors: AuthorTable) -> list[Validated]:
    """Check trajectories of one run against themselves and the run's author table; raises InvalidRecord."""
    if not trajectories:
        return []
    given = _joined(trajectories, authors)
    _check_tokens(given, authors, trajectories)
    check_fields([trajectory.record for trajectory in trajectories], "trajectory", "id")
    above = given.sequence.behavior_log_probs > 0
    log_probs = np.where(above, np.float32(0.0), given.sequence.behavior_log_probs)
    log_probs = np.where(given.behavior, log_probs, np.float32(np.nan))
    _check_summaries(given, log_probs, trajectories)
    trained = np.logical_or.reduceat(authors.is_trained(given.sequence.authors), given.starts).tolist()
    clipped = np.add.reduceat(above, given.starts, dtype=np.int64).tolist()
    facts = zip(trajectories, given.starts, trained, clipped, strict=True)
    return [_validated(trajectory, log_probs[start:], *rest) for trajectory, start, *rest in facts]


def _joined(trajectories: Sequence[Trajectory], authors: AuthorTable) -> _Tokens:
    lengths = [sum(len(segment.tokens) for segment in trajectory.segments) for trajectory in trajectories]
    if 0 in lengths:
        empty = trajectories[lengths.index(0)]
        raise refused("segments", "hold at least one token", 0, f"trajectory {empty.id}")
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    tokens = TokenSequence.concatenate(segment.tokens for segment in segments)
    # In sight of a hint, tokens were sampled in another context than the stored one.
    plain = np.repeat([s.behavior_context == "plain" for s in segments], [len(s.tokens) for s in segments])
    sampled = authors.has_behavior(tokens.authors)
    return _Tokens(tokens, authors.is_action(tokens.authors), sampled, sampled & plain, [0, *accumulate(lengths[:-1])])


def _check_tokens(given: _Tokens, authors: AuthorTable, trajectories: Sequence[Trajectory]) -> None:
    """Arrays of unequal length can't be here: TokenSequence refuses them."""
    tokens, action, behavior = given.sequence, given.action, given.behavior
    values, versions = tokens.behavior_log_probs, tokens.policy_versions
    is_log_prob = (values <= _ROUNDING) & (values > -np.inf)
    unknown = np.isnan(values)
    rules = (
        ("token_ids", "be >= 0", tokens.token_ids >= 0),
        ("authors", "be a code of the run's author table", authors.is_known(tokens.authors)),
        ("behavior_log_probs", "be finite and at most 0 for a sampled token", ~behavior | is_log_prob),
        ("behavior_log_probs", "be NaN for a token that was not sampled", action | unknown),
        ("behavior_log_probs", "be NaN where no behavior policy is known", behavior | unknown),
        ("policy_versions", "be >= 0 for a sampled token and -1 for others", given.sampled == (versions >= 0)),
        ("policy_versions", "be >= 0 for a sampled token and -1 for others", versions >= -1),
    )
    for field, rule, good in rules:
        if not good.all():
            at = int(np.argmin(good))
            trajectory, segment, offset = _place(trajectories, at)
            value = getattr(tokens, field)[at].item()
            raise refused(f"segments[{segment}].{field}[{offset}]", rule, value, f"trajectory {trajectory.id}")


def _place(trajectories: Sequence[Trajectory], at: int) -> tuple[Trajectory, int, int]:
    """Which segment of which trajectory the token at `at` of all of them belongs to, and its position there."""
    for trajectory in trajectories:
        for index, segment in enumerate(trajectory.segments):
            if at < len(segment.tokens):
                return trajectory, index, at
            at -= len(segment.tokens)
    raise IndexError(at)


def _check_summaries(given: _Tokens, log_probs: npt.NDArray[np.float32], trajectories: Sequence[Trajectory]) -> None:
    """Every record says what its tokens say."""
    starts, versions = given.starts, given.sequence.policy_versions
    lengths = np.diff([*starts, len(given.sequence)])
    num_actions = np.add.reduceat(given.action, starts, dtype=np.int64)
    oldest = np.minimum.reduceat(np.where(given.sampled, versions, np.iinfo(np.int32).max), starts)
    newest = np.maximum.reduceat(versions, starts)
    totals = np.add.reduceat(np.where(given.behavior, log_probs, np.float32(0.0)), starts, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        means = totals / np.add.reduceat(given.behavior, starts, dtype=np.int64)
    columns = (lengths, num_actions, oldest, newest, means, np.fmin.reduceat(log_probs, starts))
    for trajectory, *facts in zip(trajectories, *(column.tolist() for column in columns), strict=True):
        _check_summary(trajectory.record, dict(zip(_SUMMARY, facts, strict=True)))


def _check_summary(record: TrajectoryRecord, facts: dict[str, Any]) -> None:
    where = f"trajectory {record.id}"
    for name, fact in facts.items():
        given = getattr(record, name)
        if name in _MAY_BE_NAN:
            close = abs(given - fact) <= _AGREEMENT * max(1.0, abs(fact))
            if not close and not (math.isnan(given) and math.isnan(fact)):
                raise refused(name, f"agree with the segments ({fact:.6g})", given, where)
        elif given != fact and (facts["policy_version_max"] >= 0 or not name.startswith("policy_version")):
            raise refused(name, f"agree with the segments ({fact})", given, where)


def _validated(trajectory: Trajectory, log_probs: npt.NDArray[np.float32], trained: bool, clipped: int) -> Validated:
    record, where = trajectory.record, f"trajectory {trajectory.id}"
    segments = tuple(_with_log_probs(trajectory.segments, log_probs))
    digest = content_hash(segments)
    if record.content_hash not in ("", digest):
        raise refused("content_hash", f"be that of the tokens ({digest})", record.content_hash, where)
    state = ELIGIBLE if trained else UNTRAINABLE
    if record.state not in (ELIGIBLE, state):
        raise refused("state", f"be {state!r} for a new row with these tokens", record.state, where)
    return Validated(segments, digest, state, clipped)


def _with_log_probs(segments: Sequence[Segment], log_probs: npt.NDArray[np.float32]) -> Iterator[Segment]:
    """`log_probs` begin with those of the segments."""
    end = 0
    for segment in segments:
        start, end = end, end + len(segment.tokens)
        yield replace(segment, tokens=replace(segment.tokens, behavior_log_probs=log_probs[start:end]))
