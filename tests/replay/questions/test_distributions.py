from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from context.tokens.token_sequence import Segment
from replay import ReplayStore, questions
from replay.questions import Query
from replay.questions.filters import condition
from replay.questions.summary import bars_of
from tests.fakes.databases import Databases
from tests.fakes.records import LLM, RUN, group, new_store, policy, run_record, sql, task, tokens, trajectory

OTHER = "run-2"
NEWEST = 4
ROWS = 60
REWARDS = (0.0, 0.1 + 0.2, 0.3, 1.0)
"""0.1 + 0.2 is 0.30000000000000004, a value of its own."""


@pytest.fixture(scope="module")
def sixty_rows(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayStore]:
    """Sixty rows in groups of three, 39 of them of a run whose newest policy is 4, the others of one without."""
    store = new_store(databases.new(tmp_path_factory.mktemp("spreads") / "replay.sqlite"))
    store.add_run(run_record(OTHER))
    store.add_policy(policy(NEWEST))
    groups = [
        group(f"g{at}", run=OTHER if at % 3 == 0 else RUN, size=3, success_rate=(at % 4) / 3) for at in range(ROWS // 3)
    ]
    rows = [
        trajectory(
            f"t{index:02d}",
            segments=(Segment(tokens([5] * (1 + index), [LLM] * (1 + index), version=index % 4)),),
            run=groups[index // 3].run,
            group=groups[index // 3].id,
            slot=index,
            reward=REWARDS[index % 4],
            success=index % 4 == 3,
            num_turns=index % 5,
            stop_reason=("final", "error", "NUL \x00 within")[index % 3],
            source="teacher" if index % 10 == 0 else "self",
        )
        for index in range(ROWS)
    ]
    store.append([task()], groups, rows)
    sql(store, "update trajectories set uses = slot % 2")
    yield store
    store.close()


QUESTIONS = [
    Query(),
    Query(RUN),
    Query(OTHER),
    Query(RUN, ("success",)),
    Query(None, ("reward > 0.2", "group_success > 0.5 or staleness == 1")),
    Query(RUN, ("tokens > 1000",)),
]


@pytest.mark.parametrize("query", QUESTIONS)
def test_every_bar_counts_the_rows_that_its_filter_chooses(sixty_rows: ReplayStore, query: Query) -> None:
    answer = questions.distributions(sixty_rows, query)
    assert json.loads(json.dumps(answer)) == answer
    total = len(questions.page(sixty_rows, query, limit=ROWS)["rows"])
    assert answer["total"] == total
    assert list(answer["fields"]) == ["reward", "tokens", "staleness", "uses", "group_success", "turns"]
    for name, field in answer["fields"].items():
        assert field["unknown"] + sum(bar["count"] for bar in field["bars"]) == total
        asked = {bar["filter"]: bar["count"] for bar in field["bars"]}
        if field["unknown"]:
            asked[f"{name} is None"] = field["unknown"]
        for filter, count in asked.items():
            narrower = Query(query.run, (*query.filters, filter))
            assert len(questions.page(sixty_rows, narrower, limit=ROWS)["rows"]) == count
    assert len({bar["filter"] for field in answer["fields"].values() for bar in field["bars"]}) == sum(
        len(field["bars"]) for field in answer["fields"].values()
    )


def test_few_values_have_a_bar_each_and_many_share_round_ones(sixty_rows: ReplayStore) -> None:
    fields = questions.distributions(sixty_rows, Query(RUN))["fields"]
    assert [bar["filter"] for bar in fields["uses"]["bars"]] == ["uses == 0", "uses == 1"]
    rewards = [f"reward == {text}" for text in ("0", "0.3", "0.30000000000000004", "1")]
    assert [bar["filter"] for bar in fields["reward"]["bars"]] == rewards
    # 4 to 60 tokens: (60 - 4) / 12 = 4.7, and the next round width is 5.
    assert [(bar["low"], bar["high"]) for bar in fields["tokens"]["bars"]] == [
        (low, low + 5) for low in range(0, 65, 5)
    ]
    # Groups 0, 3, 6, ... are the other run's, so slots 0-2, 9-11, ... are left out.
    ages = Counter(NEWEST - slot % 4 for slot in range(ROWS) if slot // 3 % 3)
    assert {bar["low"]: bar["count"] for bar in fields["staleness"]["bars"]} == ages
    assert fields["staleness"]["unknown"] == 0


def test_choices_are_counted_and_staleness_is_that_of_the_buffer(sixty_rows: ReplayStore) -> None:
    choices = questions.distributions(sixty_rows, Query())["choices"]
    assert list(choices["source"].items()) == [("self", 54), ("teacher", 6)]  # every tenth; the most frequent first
    assert choices["stop_reason"] == {"final": 20, "error": 20, "NUL \x00 within": 20}
    assert choices["run"] == {RUN: 39, OTHER: 21}
    for run in (RUN, None):
        answer = questions.distributions(sixty_rows, Query(run, ("reward > 0.1",)))
        assert answer["staleness"] == questions.summary(sixty_rows, run, filter="reward > 0.1")["staleness"]
    # What was said would be read in every conversation.
    asked = Query(RUN, ("success and (tool == 'lookup' or reward > 0)",))
    assert set(questions.distributions(sixty_rows, asked).values()) == {None}


CLOSE = [0.1 + at * math.ulp(0.1) for at in (4, 5, 8, 10, 12, 16, 23, 35, 37, 38, 39, 41, 46)]
"""The last one is what the edge above it is rounded to."""
numbers = st.one_of(st.floats(-1e6, 1e6, allow_subnormal=False), st.floats(allow_nan=False, allow_infinity=False)).map(
    lambda value: value + 0.0
)


@settings(max_examples=60, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=40, unique=True))
@example([-1.7e308, *map(float, range(12))])
@example([1.7e308, *map(float, range(12))])
@example(CLOSE)
def test_each_value_is_in_exactly_one_of_at_most_thirteen_bars(values: list[float]) -> None:
    bars = bars_of("reward", sorted(values))
    assert 1 <= len(bars) <= 13
    inside = [sum(eval(bar["filter"], {"reward": value}) for value in values) for bar in bars]  # noqa: S307
    assert sum(inside) == len(values)
    if len(values) > 12:
        assert all(earlier["high"] == later["low"] for earlier, later in pairwise(bars))
    for bar in bars:
        condition(bar["filter"])
