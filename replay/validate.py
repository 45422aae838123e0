"""What may enter the buffer. Everything is checked before anything is written, and every error names its field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from context.authors import AuthorTable
from context.tokens import Segment, TokenSequence
from replay.blobs import content_hash
from replay.errors import InvalidRecord
from replay.records import ELIGIBLE, UNTRAINABLE, GroupRecord, Trajectory, TrajectoryRecord

_ROUNDING = 1e-6
"""A log-prob this far above 0 is a rounding error of softmax; beyond it, it is no log-prob."""
_AGREEMENT = 1e-3
_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (float, int), "bool": (bool,)}
_MAY_BE_NAN = ("mean_behavior_log_prob", "min_behavior_log_prob")


@dataclass(frozen=True)
class Validated:
    trajectory: Trajectory
    """With log-probs clipped to 0, its content hash, and its state."""
    clipped: int
    """Log-probs that rounding had put above 0."""


def check_fields(record: Any, where: str) -> None:
    """Every column of the type it is declared as: a driver stores NumPy scalars as bytes without a word.

    Whole numbers count something: none is negative. Real numbers are finite.
    """
    for name, declared, optional in _typed_fields(record.__class__):
        value = getattr(record, name)
        if value is None and optional:
            continue
        rule = f"be of type {declared}"
        fits = isinstance(value, _TYPES[declared]) and (declared == "bool" or not isinstance(value, bool))
        if fits and declared == "int":
            rule, fits = "be >= 0 and below 2^63", 0 <= value < 2**63
        elif fits and declared == "float":
            rule, fits = "be finite", math.isfinite(value) or (name in _MAY_BE_NAN and math.isnan(value))
        if not fits:
            raise refused(name, rule, value, where)
    if not getattr(record, "id", "id"):
        raise refused("id", "be a text of at least one character", "", where)


@cache
def _typed_fields(record_type: type) -> list[tuple[str, str, bool]]:
    """(name, declared type, may be None) of the fields that are one column."""
    declared = [(field.name, *str(field.type).partition(" | ")) for field in fields(record_type)]
    return [(name, kind, bool(optional)) for name, kind, _, optional in declared if kind in _TYPES]


def refused(field: str, rule: str, value: object, where: str) -> InvalidRecord:
    return InvalidRecord(f"{field} must {rule}, got {value!r} in {where}. Nothing of this call was stored.")


def check_group(group: GroupRecord) -> None:
    where = f"group {group.id}"
    check_fields(group, where)
    if not 0.0 <= group.success_rate <= 1.0:
        raise refused("success_rate", "be between 0 and 1", group.success_rate, where)
    if group.size < 1:
        raise refused("size", "be at least 1", group.size, where)


def validate(trajectory: Trajectory, authors: AuthorTable) -> Validated:
    """Check one trajectory against itself and its run's author table; raises InvalidRecord."""
    record = trajectory.record
    where = f"trajectory {record.id}"
    checked = [_checked(s, authors, f"segments[{i}]", where) for i, s in enumerate(trajectory.segments)]
    if not sum(len(part.tokens) for part in checked):
        raise refused("segments", "hold at least one token", 0, where)
    check_fields(record, where)
    _check_summary(record, checked, where)
    segments = tuple(replace(s, tokens=part.tokens) for part, s in zip(checked, trajectory.segments, strict=True))
    digest = content_hash(segments)
    if record.content_hash not in ("", digest):
        raise refused("content_hash", f"be that of the tokens ({digest})", record.content_hash, where)
    trained = any(authors.is_trained(part.tokens.authors).any() for part in checked)
    state = ELIGIBLE if trained else UNTRAINABLE
    if record.state not in (ELIGIBLE, state):
        raise refused("state", f"be {state!r} for a new row with these tokens", record.state, where)
    stored = replace(record, content_hash=digest, state=state)
    return Validated(replace(trajectory, record=stored, segments=segments), sum(part.clipped for part in checked))


@dataclass(frozen=True)
class _Checked:
    """One segment that keeps the rules."""

    tokens: TokenSequence
    log_probs: npt.NDArray[np.float32]
    """Of its tokens of a known behavior policy."""
    versions: npt.NDArray[np.int32]
    """Of its action tokens."""
    clipped: int


def _checked(segment: Segment, authors: AuthorTable, name: str, where: str) -> _Checked:
    tokens = segment.tokens
    known = authors.is_known(tokens.authors)
    action = authors.is_action(tokens.authors)
    # In sight of a hint, tokens were sampled in another context than the stored one.
    behavior = authors.has_behavior(tokens.authors) & (segment.behavior_context == "plain")
    values, versions = tokens.behavior_log_probs, tokens.policy_versions
    # Arrays of unequal length can't be here: TokenSequence refuses them.
    rules = (
        ("token_ids", "be >= 0", tokens.token_ids >= 0),
        ("authors", "be a code of the run's author table", known),
        ("behavior_log_probs", "be finite and at most 0 for a sampled token", ~behavior | _is_log_prob(values)),
        ("behavior_log_probs", "be NaN for a token that was not sampled", action | np.isnan(values)),
        ("behavior_log_probs", "be NaN where no behavior policy is known", behavior | np.isnan(values)),
        ("policy_versions", "be >= 0 for a sampled token and -1 for others", action == (versions >= 0)),
        ("policy_versions", "be >= 0 for a sampled token and -1 for others", versions >= -1),
    )
    for field, rule, good in rules:
        if not good.all():
            at = int(np.argmin(good))
            raise refused(f"{name}.{field}[{at}]", rule, getattr(tokens, field)[at].item(), where)
    above = values > 0
    stored = np.where(behavior, np.where(above, np.float32(0.0), values), np.float32(np.nan))
    kept = TokenSequence(tokens.token_ids, tokens.authors, stored, versions)
    return _Checked(kept, stored[behavior], versions[action], int(np.count_nonzero(above)))


def _is_log_prob(values: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    return (values <= _ROUNDING) & (values > -np.inf)


def _check_summary(record: TrajectoryRecord, checked: Sequence[_Checked], where: str) -> None:
    """The record says what its tokens say."""
    log_probs = np.concatenate([part.log_probs for part in checked])
    versions = np.concatenate([part.versions for part in checked])
    facts = {"num_tokens": sum(len(part.tokens) for part in checked), "num_action_tokens": len(versions)}
    if len(versions):
        facts |= {"policy_version_min": int(versions.min()), "policy_version_max": int(versions.max())}
    mean = least = math.nan
    if len(log_probs):
        mean, least = float(log_probs.mean(dtype=np.float64)), float(log_probs.min())
    for name, fact in facts.items():
        if getattr(record, name) != fact:
            raise refused(name, f"agree with the segments ({fact})", getattr(record, name), where)
    for name, value in zip(_MAY_BE_NAN, (mean, least), strict=True):
        given = getattr(record, name)
        if math.isnan(given) != math.isnan(value) or abs(given - value) > _AGREEMENT * max(1.0, abs(value)):
            raise refused(name, f"agree with the segments ({value:.6g})", given, where)
