from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from context.tokens.token_sequence import Segment, TokenSequence
from replay import InvalidRecord, ReplayStore
from replay.storage.validate import SUMMARY, summarised
from tests.fakes.records import AUTHORS, SHORT, group, new_store, task, trajectory

NAN, INF = float("nan"), float("inf")
BIG = 2**31


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayStore]:
    with closing(new_store(tmp_path_factory.mktemp("buffer") / "replay.sqlite")) as store:
        yield store


def refuses(store: ReplayStore, bad: Any, message: str) -> None:
    """The whole append fails, also its good rows."""
    with pytest.raises(InvalidRecord, match=message) as raised:
        store.append([task()], [group()], [trajectory("good"), bad, trajectory("also good")])
    assert f" in trajectory {bad.id}. " in str(raised.value)
    with store.reading() as connection:
        assert connection.exec_driver_sql("select count(*) from trajectories").scalar() == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": NAN}, "^reward must be a finite number, got nan in trajectory a"),
        ({"reward": "1"}, "^reward must be a valid number, got '1'"),
        ({"advantage": -INF}, "^advantage must be a finite number, got -inf"),
        ({"mean_entropy": NAN}, "^mean_entropy must be a finite number"),
        ({"temperature": -1.0}, "^temperature must be greater than or equal to 0, got -1.0"),
        ({"top_p": 1.5}, "^top_p must be less than or equal to 1, got 1.5"),
        ({"source": "a/b"}, "^source must match pattern .*, got 'a/b'"),
        ({"success": 1}, "^success must be a valid boolean, got 1"),
        ({"iteration": True}, "^iteration must be a valid integer, got True"),
        ({"slot": BIG}, "^slot must be less than 2147483648"),
        ({"member": np.int64(0)}, "^member must be a valid integer"),
        ({"content_hash": "0" * 64}, "^content_hash must be that of the tokens"),
        ({"state": "orphaned"}, "^state must be 'eligible' for a new row"),
        ({"id": ""}, "^id must be a text of at least one character"),
        ({"stop_reason": None}, "^stop_reason must be a valid string, got None"),
    ],
)
def test_record_field_is_refused_by_name(empty: ReplayStore, changes: dict[str, Any], message: str) -> None:
    refuses(empty, trajectory(**{"id": "a", **changes}), message)


def test_numbers_that_follow_from_the_tokens_are_filled_in(tmp_path: Path) -> None:
    hinted = Segment(replace(SHORT, behavior_log_probs=np.full(len(SHORT), np.nan, np.float32)), "clean", "hinted")
    demonstrated = Segment(TokenSequence.constant([1, 2, 3], AUTHORS.code("demonstration")))
    given = [
        trajectory("none given"),
        trajectory("others given", num_tokens=99, policy_version_max=9, mean_behavior_log_prob=-9.0),
        trajectory("two segments", segments=(Segment(SHORT), hinted)),
        trajectory("nobody sampled it", segments=(demonstrated,), policy_version_min=3, policy_version_max=4),
    ]
    store = new_store(tmp_path / "replay.sqlite")
    store.append([task()], [group()], given)
    found = [row.record for row in store.read([row.id for row in given])]
    # SHORT has 6 tokens, 3 of them sampled by version 0 with log-probs -0.5, -1 and -1.5.
    numbers = [[getattr(record, name) for name in SUMMARY] for record in found]
    assert numbers[0] == numbers[1] == [6, 3, 0, 0, -1.0, -1.5]
    assert numbers[2] == [12, 6, 0, 0, -1.0, -1.5]
    assert numbers[3][:4] == [3, 3, 3, 4] and np.isnan(numbers[3][4:]).all()
    assert repr([row.record for row in summarised(given, AUTHORS)]) == repr(
        [replace(r, content_hash="") for r in found]
    )
    report = store.append([], [], given)
    assert (report.inserted, report.duplicates) == (0, 4)


def changed(field: str, position: int, value: float) -> tuple[Segment, ...]:
    values = getattr(SHORT, field).copy()
    values[position] = value
    return (Segment(SHORT), Segment(replace(SHORT, **{field: values})))


SAMPLED = "must be finite and at most 0 for a sampled token, got"
VERSION = r"\] must be >= 0 for a sampled token and -1 for others"


# SHORT is template, user, llm, llm, env, llm.
@pytest.mark.parametrize(
    ("field", "position", "value", "message"),
    [
        ("token_ids", 1, -1, r"^segments\[1\].token_ids\[1\] must be >= 0, got -1"),
        ("authors", 0, 99, r"^segments\[1\].authors\[0\] must be a code of the run's author table, got 99"),
        ("behavior_log_probs", 3, NAN, rf"^segments\[1\].behavior_log_probs\[3\] {SAMPLED} nan"),
        ("behavior_log_probs", 3, -INF, f"{SAMPLED} -inf"),
        ("behavior_log_probs", 3, 0.01, f"{SAMPLED} 0.0"),
        (
            "behavior_log_probs",
            4,
            0.0,
            r"behavior_log_probs\[4\] must be NaN for a token that was not sampled, got 0.0",
        ),
        ("policy_versions", 4, 3, rf"policy_versions\[4{VERSION}, got 3"),
        ("policy_versions", 5, -1, rf"policy_versions\[5{VERSION}"),
    ],
)
def test_token_is_refused_by_field_and_position(
    empty: ReplayStore, field: str, position: int, value: float, message: str
) -> None:
    refuses(empty, trajectory("a", segments=changed(field, position, value)), message)


@pytest.mark.parametrize("segments", [(), (Segment(TokenSequence.constant([], 0)),)])
def test_trajectory_without_tokens_is_refused(empty: ReplayStore, segments: tuple[Segment, ...]) -> None:
    refuses(empty, trajectory("a", segments=segments), "^segments must hold at least one token, got 0")


@pytest.mark.parametrize(
    ("task_given", "group_given", "message"),
    [
        (task(), group(success_rate=1.5), "^success_rate must be less than or equal to 1, got 1.5 in group group-1"),
        (task(), group(reward_std=NAN), "^reward_std must be a finite number"),
        (task(), group(size=0), "^size must be greater than or equal to 1"),
        *((replace(task(), payload={"x": bad}), group(), "^payload must be JSON") for bad in (NAN, {1, 2}, object())),
    ],
)
def test_task_or_group_is_refused_by_field(empty: ReplayStore, task_given: Any, group_given: Any, message: str) -> None:
    with pytest.raises(InvalidRecord, match=message):
        empty.append([task_given], [group_given], [])
