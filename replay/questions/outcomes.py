"""What failed episodes have in common, beside the successful ones."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from replay.questions.filters import condition
from replay.questions.filters.query import QueryResult, run_is
from replay.questions.trajectory import last_answer
from replay.records import ORPHANED
from replay.storage.format import schema
from replay.storage.format.rows import readable_messages
from replay.storage.format.schema import messages
from replay.store import ReplayStore

_rows = schema.trajectories.c
FAILED, SUCCESSFUL = "failed", "successful"
_SAMPLED = 1_000
"""The newest episodes of each outcome whose last answers are read,"""
_CHARACTERS = 2_000
"""and so much of each."""
_PRIOR = 10.0
"""Episodes that the prior counts for."""
_CLEARLY = 2.0
"""Standard errors."""
_MOST_WORDS = 20
_WORD = re.compile(r"\w+")
_MEANS = ("num_turns", "num_tool_calls", "num_tokens", "num_action_tokens", "reward")

_Counts = Mapping[str, Counter[str]]
"""By outcome."""


def outcomes(store: ReplayStore, run: str | None = None, filters: Sequence[str] = ()) -> QueryResult:
    """Failed and successful episodes of a run (None: of all), or those that all filters hold for, beside each other.

    `episodes` of each outcome; `means`; the share of each outcome's episodes by `stop_reasons`, and by `error_kinds`
    with at least one such tool call. `words`: those clearly more frequent in the last answers of failures, counted once
    an episode, by the log-odds ratio in standard errors (z > 2) under a prior of 10 episodes at the word's overall
    share (Monroe et al. 2008, doi:10.1093/pan/mpn018), of the newest 1,000 episodes of each outcome: `sampled` says of
    how many. Rows that a resume undid are left out.
    """
    mine = sa.and_(run_is(run, _rows.run), _rows.state != ORPHANED, *map(condition, filters))
    reasons, kinds, sums = ({FAILED: Counter[str](), SUCCESSFUL: Counter[str]()} for _ in range(3))
    with store.reading() as connection:
        columns = (sa.func.sum(sa.cast(_rows[name], sa.Double)).label(name) for name in _MEANS)
        query = sa.select(_rows.stop_reason, _rows.success, sa.func.count().label("episodes"), *columns).where(mine)
        for row in connection.execute(query.group_by(_rows.stop_reason, _rows.success)).mappings():
            outcome = _outcome(row["success"])
            reasons[outcome][row["stop_reason"]] += row["episodes"]
            sums[outcome].update({name: row[name] for name in _MEANS})
        errors = sa.select(_rows.error_kinds, _rows.success, sa.func.count()).where(
            mine, _rows.error_kinds.is_not(None)
        )
        for words, success, episodes in connection.execute(errors.group_by(_rows.error_kinds, _rows.success)):
            kinds[_outcome(success)].update(dict.fromkeys(words.split(), episodes))
        answers = {name: _answers(connection, mine, success=name == SUCCESSFUL) for name in sums}
    episodes = {name: counts.total() for name, counts in reasons.items()}
    return {
        "run": run,
        "filters": list(filters),
        "episodes": episodes,
        "means": [_by_episode(name, sums, episodes) for name in _MEANS],
        "stop_reasons": _shares(reasons, episodes),
        "error_kinds": _shares(kinds, episodes),
        "words": _frequent_in_failures(answers),
        "sampled": {name: len(each) for name, each in answers.items()},
    }


def _outcome(success: bool) -> str:
    return SUCCESSFUL if success else FAILED


def _by_episode(name: str, sums: _Counts, episodes: Mapping[str, int]) -> QueryResult:
    return {"name": name, **{each: sums[each][name] / count if count else None for each, count in episodes.items()}}


def _shares(counts: _Counts, episodes: Mapping[str, int]) -> list[QueryResult]:
    """The share of each outcome's episodes by name; what sets failures apart most comes first."""
    names = sorted({name for each in counts.values() for name in each})
    found = [_by_episode(name, counts, episodes) for name in names]
    return sorted(found, key=lambda row: (row[SUCCESSFUL] or 0.0) - (row[FAILED] or 0.0))


def _answers(connection: sa.Connection, mine: sa.ColumnElement[bool], *, success: bool) -> list[set[str]]:
    """The words of the last answer of each of the newest episodes; damaged and missing messages are left out."""
    query = sa.select(messages.c.num_messages, messages.c.said, messages.c.checksum)
    query = query.join_from(schema.trajectories, messages, _rows.id == messages.c.trajectory)
    newest = query.where(mine, _rows.success == success).order_by(_rows.iteration.desc(), _rows.slot, _rows.id)
    found = []
    for row in connection.execute(newest.limit(_SAMPLED)):
        answer = last_answer(readable_messages(*row) or ())
        if answer is not None:
            found.append(set(_WORD.findall(answer[:_CHARACTERS])))
    return found


def _frequent_in_failures(answers: Mapping[str, Sequence[set[str]]]) -> list[QueryResult]:
    counts = {name: Counter(word for words in each for word in words) for name, each in answers.items()}
    sizes = {name: len(each) for name, each in answers.items()}
    if not all(sizes.values()):
        return []
    found: list[QueryResult] = []
    for word in counts[FAILED]:
        prior = _PRIOR * (sum(counts[name][word] for name in counts) + 0.5) / (sum(sizes.values()) + 1)
        seen = {name: counts[name][word] + prior for name in counts}
        odds = {name: seen[name] / (sizes[name] + _PRIOR - seen[name]) for name in counts}
        z = math.log(odds[FAILED] / odds[SUCCESSFUL]) / math.sqrt(sum(1 / each for each in seen.values()))
        if z > _CLEARLY:
            found.append({"word": word, **{name: counts[name][word] / sizes[name] for name in counts}, "z": z})
    return sorted(found, key=lambda row: (-row["z"], row["word"]))[:_MOST_WORDS]
