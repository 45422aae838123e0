"""The tokens of a trajectory: text, author, masks, log-probs, drift, advantage, policy version and turn of each."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from context.authors import AuthorTable
from context.tokens.loss_mask import loss_mask, response_mask, runs_of
from context.tokens.session_nodes import Node, Path
from context.tokens.session_segments import sequences_of
from context.tokens.token_sequence import MOST_TOKENS_OF_A_CHARACTER, NOT_SAMPLED, Decoder, pieces
from replay.errors import CorruptTrajectory, ReplayError
from replay.questions.filters.query import QueryResult
from replay.records import COMMITTED, Trajectory
from replay.storage.format.encoding import BlobError, decode_log_probs
from replay.storage.format.rows import known
from replay.storage.format.schema import draws, token_scores
from replay.storage.read import author_table, load
from replay.store import ReplayStore

MOST_TOKENS = 16_384
"""Most tokens in one answer."""
_DIGITS = 6
"""Digits of log-probs and drift after the point."""
_NO_TURN = -1
LOG_RATIO_BOUND = 20.0
"""Log drifts are clamped to this many nats, as in `agentloop.algorithms.log_probs`."""

CodecOf = Callable[[str], Decoder | None]
"""A function that returns the tokenizer of a run's rows. None: it is missing, or may not be the right one."""


def no_codec(run: str) -> None:
    """Stand in for `CodecOf` if there are no tokenizers. Tokens are then shown as ids."""


def tokens(
    store: ReplayStore,
    id: str,
    segment: int = 0,
    *,
    first: int = 0,
    count: int = MOST_TOKENS,
    codec_of: CodecOf = no_codec,
) -> QueryResult:
    """Return up to `count` tokens of a segment from token `first` on, as one list per quantity.

    Entry t of a list is of token first + t.
    - texts: None for a token that continues the character before it. The whole list is None without a tokenizer.
    - authors: positions in `author_names`.
    - behavior_log_probs: in nats; None for tokens that no policy sampled.
    - current_log_probs, drift = exp(clamp(current - behavior, -20, 20)): None as a whole if `replay rescore` has not
      scored the segment.
    - advantages: of trained tokens, from the last draw, or else from the row's group.
    - turns: None for tokens that the policy did not sample.

    Raises CorruptTrajectory for damaged tokens or scores, and ContentGone if there are no tokens to show.
    """
    with store.reading() as connection:
        (found,) = load(connection, [id], with_messages=False).in_order([id])
        authors = author_table(connection, found.record.run)
        score = scores_of(connection, id).get(segment)
        advantage = _advantage(connection, found)
    if not 0 <= segment < len(found.segments):
        raise ReplayError(f"segment must be from 0 to {len(found.segments) - 1}, got {segment}.")
    whole = found.segments[segment].tokens
    first = min(max(0, first), len(whole))
    last = min(len(whole), first + max(0, min(count, MOST_TOKENS)))
    part = slice(first, last)
    current = None if score is None else current_log_probs(id, score["log_probs"], len(whole))
    codec = codec_of(found.record.run)
    trained = loss_mask(whole, authors)[part]
    codes, places = np.unique(whole.authors[part], return_inverse=True)
    behavior = whole.behavior_log_probs[part]
    return {
        "id": id,
        "run": found.record.run,
        "segment": segment,
        "first": first,
        "total": len(whole),
        "token_ids": whole.token_ids[part].tolist(),
        "texts": None if codec is None else _texts(whole.token_ids, first, last, codec),
        "author_names": [authors.name(int(code)) for code in codes],
        "authors": places.tolist(),
        "action_mask": response_mask(whole, authors)[part].tolist(),
        "loss_mask": trained.tolist(),
        "behavior_log_probs": _numbers(behavior),
        "current_log_probs": None if current is None else _numbers(current[part]),
        "drift": None if current is None else _numbers(drift_of(current[part], behavior)),
        "scored_by": None if score is None else scorer(score),
        "advantages": [advantage["value"] if token else None for token in trained.tolist()],
        "advantage": advantage,
        "policy_versions": _without(whole.policy_versions[part], NOT_SAMPLED),
        "turns": _without(turns_of(found, authors)[segment][part], _NO_TURN),
    }


def scores_of(connection: sa.Connection, id: str) -> dict[int, sa.RowMapping]:
    query = sa.select(token_scores).where(token_scores.c.trajectory == id)
    return {row["position"]: row for row in connection.execute(query).mappings()}


def scorer(score: sa.RowMapping) -> QueryResult:
    return {"run": score["run"], "policy_version": score["policy_version"]}


def _advantage(connection: sa.Connection, found: Trajectory) -> QueryResult:
    """Return the advantage in the last update that used the trajectory, or else the stored one."""
    used = (draws.c.trajectory == found.id) & (draws.c.state == COMMITTED) & draws.c.advantage.is_not(None)
    query = sa.select(draws.c.advantage, draws.c.run, draws.c.iteration).where(used)
    # The run's own draws come first, because iterations of other runs can't be compared with its own.
    order = (draws.c.run == found.record.run).desc(), draws.c.iteration.desc(), draws.c.run, draws.c.slot
    last = connection.execute(query.order_by(*order).limit(1)).one_or_none()
    if last is None:
        return {"value": known(found.record.advantage), "run": None, "iteration": None}
    return {"value": last[0], "run": last[1], "iteration": last[2]}


def current_log_probs(id: str, scores: bytes, count: int) -> npt.NDArray[np.float32]:
    """Return the stored log-probs [T] of a segment of `count` tokens. Raises CorruptTrajectory for damaged ones."""
    try:
        return decode_log_probs(scores, count)
    except BlobError as error:
        raise CorruptTrajectory(id, f"scores: {error}") from error


def drift_of(current: npt.NDArray[np.float32], behavior: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return exp(clamp(current - behavior, -20, 20)). NaN: one of the two is NaN."""
    return np.exp(np.clip(current.astype(np.float64) - behavior, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def _numbers(values: npt.NDArray[Any]) -> list[float | None]:
    """Return rounded numbers for JSON. Unknown values are None, and -0.0 becomes 0.0."""
    rounded = np.round(values.astype(np.float64), _DIGITS) + 0.0
    return [known(value) for value in rounded.tolist()]


def _without(values: npt.NDArray[Any], absent: int) -> list[int | None]:
    return [None if value == absent else value for value in values.tolist()]


def _texts(ids: npt.NDArray[np.int32], first: int, last: int, codec: Decoder) -> list[str | None]:
    """Return the texts of a range of tokens. Tokens around the range are decoded too, so that characters stay whole."""
    begin = max(0, first - 2 * MOST_TOKENS_OF_A_CHARACTER)
    texts: list[str | None] = [None] * (last - first)
    for at, _, text in pieces(ids[begin : last + MOST_TOKENS_OF_A_CHARACTER].tolist(), codec):
        if first <= begin + at < last:
            texts[begin + at - first] = text
    return texts


def turns_of(found: Trajectory, authors: AuthorTable) -> list[npt.NDArray[np.int32]]:
    """Return the turn of each token, an array [T] for each segment. -1: the token belongs to no turn.

    A reply is a maximal run of action tokens in a segment of the conversation. The last `num_turns` replies are the
    turns; earlier ones were given in the policy's place. If there are fewer replies than turns, all entries are -1. In
    an agent's session, the entry is the number of the answered request, in each sequence that has the whole reply.
    """
    if found.nodes:
        return [_turns_of_path(found.nodes, path) for path in sequences_of(found.nodes).values()]
    turns = [np.full(len(segment.tokens), _NO_TURN, np.int32) for segment in found.segments]
    answers = [
        (turn, start, end)
        for turn, segment in zip(turns, found.segments, strict=True)
        if segment.reason != "fork"
        for start, end in runs_of(response_mask(segment.tokens, authors))
    ]
    turns_before = len(answers) - found.record.num_turns
    if turns_before >= 0:
        for number, (turn, start, end) in enumerate(answers[turns_before:]):
            turn[start:end] = number
    return turns


def _turns_of_path(nodes: Sequence[Node], path: Path) -> npt.NDArray[np.int32]:
    turns = []
    for number, count in path:
        sampled = nodes[number].num_sampled if count == len(nodes[number].tokens) else 0
        turns.append(np.repeat(np.array([_NO_TURN, number], np.int32), [count - sampled, sampled]))
    return np.concatenate(turns)


def whole_segments(connection: sa.Connection, found: Trajectory, authors: AuthorTable) -> list[QueryResult]:
    """Return every token of every segment as stored numbers, without text."""
    scores = scores_of(connection, found.id)
    return [_whole(found, position, authors, scores.get(position)) for position in range(len(found.segments))]


def _whole(found: Trajectory, position: int, authors: AuthorTable, score: sa.RowMapping | None) -> QueryResult:
    segment = found.segments[position]
    tokens = segment.tokens
    current = None if score is None else current_log_probs(found.id, score["log_probs"], len(tokens))
    return {
        "reason": segment.reason,
        "token_ids": tokens.token_ids.tolist(),
        "authors": [authors.name(code) for code in tokens.authors.tolist()],
        "loss_mask": authors.is_trained(tokens.authors).tolist(),
        "behavior_log_probs": [known(value) for value in tokens.behavior_log_probs.tolist()],
        "policy_versions": tokens.policy_versions.tolist(),
        "current_log_probs": None if current is None else [known(value) for value in current.tolist()],
        "scored_by": None if score is None else scorer(score),
    }
