"""Tokens of trajectories as Arrow columns, with one list per trajectory or one row per token."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from context.authors import AuthorTable
from replay.errors import CorruptTrajectory
from replay.frames.arrow_rows import arrow
from replay.questions.tokens import current_log_probs, drift_of
from replay.records import Trajectory
from replay.storage.format.rows import chunked
from replay.storage.format.schema import token_scores
from replay.storage.read import author_table, load
from replay.storage.statements import selected

_Arrays = Mapping[str, npt.NDArray[Any]]

TOKEN_COLUMNS: Mapping[str, tuple[str, str]] = {
    "segment": ("int32", "position of the training sequence among those of its trajectory"),
    "position": ("int32", "position within the segment"),
    "token_id": ("int32", "id in the model's vocabulary"),
    "author": ("string", "who wrote it"),
    "loss_mask": ("bool", "whether it is trained"),
    "behavior_log_prob": ("float32", "log-prob of the policy that sampled it, in nats; null where none did"),
    "policy_version": ("int32", "publishes before it was sampled; -1 where it was not"),
    "current_log_prob": ("float32", "log-prob by `replay rescore`, in nats; null where it did not score it"),
    "token_drift": ("float64", "current over behavior probability; null where either is unknown"),
}
"""The type and meaning of each column of tokens. A column of trajectories has lists over all segments in turn."""


class TokenReader:
    """Reads tokens of trajectories from one connection. The authors of each run are read once."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self._authors: dict[str, AuthorTable] = {}

    def read(self, ids: Sequence[str]) -> dict[str, _Arrays]:
        """Read TOKEN_COLUMNS by id, each an array [T] over all segments. Raises CorruptTrajectory.

        Rows whose tokens are gone are left out.
        """
        found = load(self._connection, ids, with_messages=False)
        for id, reason in found.corrupt.items():
            raise CorruptTrajectory(id, reason)
        scores = self._scores(list(found.whole))
        return {id: self._arrays(row, scores) for id, row in found.whole.items()}

    def _scores(self, ids: Sequence[str]) -> dict[tuple[str, int], bytes]:
        columns = [token_scores.c[name] for name in ("trajectory", "position", "log_probs")]
        rows = selected(self._connection, columns, token_scores.c.trajectory, ids)
        return {(id, position): blob for id, position, blob in map(tuple, rows)}

    def _arrays(self, row: Trajectory, scores: Mapping[tuple[str, int], bytes]) -> _Arrays:
        run = row.record.run
        if run not in self._authors:
            self._authors[run] = author_table(self._connection, run)
        authors = self._authors[run]
        parts = [_segment(row, at, authors, scores.get((row.id, at))) for at in range(len(row.segments))]
        return {name: np.concatenate([part[name] for part in parts]) for name in TOKEN_COLUMNS}


def _segment(row: Trajectory, at: int, authors: AuthorTable, score: bytes | None) -> _Arrays:
    """Return the columns of one segment. `score` has its current log-probs as they are stored; None: not scored."""
    tokens = row.segments[at].tokens
    n = len(tokens)
    current = np.full(n, np.nan, np.float32) if score is None else current_log_probs(row.id, score, n)
    codes, places = np.unique(tokens.authors, return_inverse=True)
    names = np.array([authors.name(int(code)) for code in codes], object)
    return {
        "segment": np.full(n, at, np.int32),
        "position": np.arange(n, dtype=np.int32),
        "token_id": tokens.token_ids,
        "author": names[places],
        "loss_mask": authors.is_trained(tokens.authors),
        "behavior_log_prob": tokens.behavior_log_probs,
        "policy_version": tokens.policy_versions,
        "current_log_prob": current,
        "token_drift": drift_of(current, tokens.behavior_log_probs),
    }


def list_arrays(found: Sequence[_Arrays | None], names: Sequence[str]) -> dict[str, Any]:
    """Return columns with one list per trajectory, by name. Null: the trajectory's tokens are gone."""
    pa = arrow()
    offsets = np.concatenate([[0], np.cumsum([0 if each is None else len(each["token_id"]) for each in found])])
    gone = np.array([each is None for each in found])
    known = [each for each in found if each is not None]
    lists = {}
    for name in names:
        values = column_array(name, np.concatenate([each[name] for each in known]) if known else np.array([]))
        mask = pa.array(gone) if gone.any() else None
        lists[name] = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, mask=mask)
    return lists


def column_array(name: str, values: npt.NDArray[Any]) -> Any:
    """Make an Arrow column. NaN, which means unknown, becomes null."""
    return arrow().array(values, token_type(name), from_pandas=True)


def token_type(name: str) -> Any:
    pa = arrow()
    return {"bool": pa.bool_(), "string": pa.string()}.get(kind := TOKEN_COLUMNS[name][0]) or pa.type_for_alias(kind)


def in_chunks(ids: Sequence[str], reader: TokenReader) -> Any:
    """Yield chunks of ids with their tokens, in order. None: the tokens are gone."""
    for chunk in chunked(ids):
        found = reader.read(chunk)
        yield chunk, [found.get(id) for id in chunk]
