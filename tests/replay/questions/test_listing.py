import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from context.authors import LLM
from context.messages import Message, ToolCall
from context.tokens.token_sequence import Segment
from replay import ReplayStore, Trajectory, questions
from replay.questions import Patience, Query, Sort
from replay.questions.filters import condition
from replay.questions.summary import bars_of
from replay.questions.trajectory import MOST_SHORT, shorten_conversations
from replay.storage.databases import Location
from replay.storage.format.column_types import to_storable
from tests.fakes.records import MESSAGES, RUN, a_run, add_draw, iterate, new_store, policy, put, sql, tokens, trajectory
from tests.fakes.replay_command import counted

UNPUBLISHED = "run-2"
"""A run without policies: how stale its rows are is unknown."""
NEWEST = 3
SIZE = 30
WORD = "needle"


def row(index: int, run: str) -> Trajectory:
    """Values that many rows share, in an order that is not that of ids."""
    made = trajectory(
        f"{index * 7 % SIZE:02d}-{run}",
        segments=(Segment(tokens([5] * (1 + index), [LLM] * (1 + index), version=index % 4)),),
        run=run,
        group=f"{run}-{index % 2 + 1}",
        iteration=1 + index % 2,
        slot=index // 3,
        reward=(index % 4) / 4,
        success=index % 4 == 3,
        advantage=index % 5 - 2.5,
        num_turns=index % 3,
        num_tool_calls=index % 2,
        stop_reason=("final", "error", "NUL \x00 within")[index % 3],
        source=("self", "hindsight")[index % 2],
    )
    said = Message("user", WORD if index % 3 == 0 else "hay")
    return Trajectory(made.record, made.segments, (said,))


def append(store: ReplayStore, run: str, indices: range) -> None:
    put(store, *(row(index, run) for index in indices))


@pytest.fixture(scope="module")
def two_runs(module_store: ReplayStore) -> ReplayStore:
    store = module_store
    store.add_run(a_run(UNPUBLISHED))
    store.add_policy(policy(NEWEST))
    append(store, RUN, range(SIZE))
    append(store, UNPUBLISHED, range(SIZE // 2))
    # Draws of the rows make uses of 0, 1 and 2.
    sql(store, "update trajectories set uses = (slot + iteration) % 3")
    # Two rows of three are drawn, with drifts that several have.
    for at, (id,) in enumerate(sql(store, "select id from trajectories order by id")):
        if (at + 1) % 3:
            add_draw(store, id, slot=at, mean=1 + at % 4 / 4, largest=2.0 + at % 5)
    return store


def in_order(store: ReplayStore, query: Query) -> list[str]:
    rows = questions.page(store, Query(query.run), limit=1000)["rows"]
    name = query.sort.value
    place: Callable[[dict[str, Any]], Any] = lambda each: [each[n] for n in ("iteration", "slot", "run", "id")]  # noqa: E731
    known = [each for each in rows if each[name] is not None]
    unknown = [each for each in rows if each[name] is None]
    stored: Callable[[Any], Any] = lambda value: to_storable(value) if isinstance(value, str) else value  # noqa: E731
    known.sort(key=lambda each: (stored(each[name]), place(each)), reverse=not query.ascending)
    unknown.sort(key=place, reverse=not query.ascending)
    return [each["id"] for each in known + unknown]


def ids(answer: questions.QueryResult) -> list[str]:
    return [each["id"] for each in answer["rows"]]


def pages(store: ReplayStore, query: Query, limit: int, **options: Any) -> list[list[str]]:
    """The ids of every page; walked back from the last one, they are the same."""
    answers = [questions.page(store, query, limit=limit, **options)]
    while answers[-1]["after"]:
        answers.append(questions.page(store, query, limit=limit, after=answers[-1]["after"], **options))
    assert answers[0]["before"] is None
    for earlier, later in itertools.pairwise(answers) if all(each["complete"] for each in answers) else ():
        back = questions.page(store, query, limit=limit, before=later["before"], **options)
        assert ids(back) == ids(earlier)
        assert (back["before"] is None) == (earlier is answers[0])
    return [ids(answer) for answer in answers]


@pytest.mark.parametrize("sort", list(Sort))
def test_pages_joined_are_the_sorted_list_with_ties_and_unknown_values(two_runs: ReplayStore, sort: Sort) -> None:
    for ascending in (False, True):
        for run in (None, RUN, UNPUBLISHED):
            query = Query(run, (), sort, ascending)
            wanted = in_order(two_runs, query)
            size = {None: SIZE + SIZE // 2, RUN: SIZE, UNPUBLISHED: SIZE // 2}[run]
            assert len(wanted) == size
            # 45, 30 or 15 rows: the last page of 15 is full, and nothing comes after it.
            for limit in (7, 15):
                found = pages(two_runs, query, limit)
                assert [len(page) for page in found[:-1]] == [limit] * (len(found) - 1)
                assert [id for page in found for id in page] == wanted
                assert len(found) == -(-size // limit)


@pytest.mark.parametrize("sort", [Sort.iteration, Sort.reward, Sort.num_tokens, Sort.staleness])
def test_no_row_is_lost_or_seen_twice_while_rows_and_policies_are_added(location: Location, sort: Sort) -> None:
    """Each publish makes all rows of the run staler by one, also the one a page ended with."""
    with closing(new_store(location)) as store:
        for ascending in (False, True):
            run = f"run-{ascending}"
            store.add_run(a_run(run))
            store.add_policy(policy(NEWEST, run=run))
            append(store, run, range(0, SIZE, 2))
            query = Query(run, (), sort, ascending)
            answer = questions.page(store, query, limit=4)
            seen = ids(answer)
            for new in range(1, SIZE, 2):
                append(store, run, range(new, new + 1))
                store.add_policy(policy(NEWEST + new, run=run))
                if answer["after"]:
                    answer = questions.page(store, query, limit=4, after=answer["after"])
                    seen += ids(answer)
            assert answer["after"] is None
            assert len(seen) == len(set(seen))
            assert {row(index, run).id for index in range(0, SIZE, 2)} <= set(seen)


@pytest.mark.parametrize("patience", [Patience(rows=4, seconds=60), Patience(rows=600, seconds=0)])
@pytest.mark.parametrize("sort", [Sort.iteration, Sort.reward])
def test_search_for_a_text_goes_on_where_its_patience_ended(
    two_runs: ReplayStore, sort: Sort, patience: Patience, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.storage.format.rows._MOST_PARAMETERS", 4)
    query = Query(RUN, (f"'{WORD}' in text", "reward >= 0"), sort)
    first = questions.page(two_runs, query, limit=5, patience=patience)
    # No time: the first four rows are looked at. Time for all: so many are looked at as patience has rows.
    assert (first["searched"], first["complete"]) == (4, False)
    whole = questions.page(two_runs, query, limit=50, patience=Patience(seconds=60))
    assert (len(whole["rows"]), whole["after"], whole["complete"], whole["searched"]) == (10, None, True, SIZE)
    needles = {row(index, RUN).id for index in range(0, SIZE, 3)}
    found = [id for page in pages(two_runs, query, 5, patience=patience) for id in page]
    assert found == [id for id in in_order(two_runs, query) if id in needles]
    assert len(found) == SIZE / 3


def test_rows_of_a_run_are_read_and_counted_off_its_index_without_sorting(tmp_path: Path) -> None:
    store, found = new_store(tmp_path / "replay.sqlite"), []
    append(store, RUN, range(SIZE))
    query = Query(RUN, ("success and reward > 0.1", "uses < 3"))
    with counted() as asked:
        questions.distributions(store, query)
        questions.summary(store, RUN, filter=" and ".join(query.filters))
        after = questions.page(store, Query(RUN, ()), limit=3)["after"]
        questions.page(store, Query(RUN, (), ascending=True), limit=3, after=after)
    with counted() as of_one:
        iterate(store, 3)
        of_one.clear()
        questions.iteration(store, RUN, 3)
        questions.task(store, "task-1", RUN)
    for statement in filter(lambda each: each.startswith("SELECT"), asked):
        plan = sql(store, f"explain query plan {statement}", *[None] * statement.count("?"))
        found += [step for *_, step in plan if "trajectories" in step.split()[1:2]]
    for statement in filter(lambda each: each.startswith("SELECT"), of_one):
        plan = sql(store, f"explain query plan {statement}", *[None] * statement.count("?"))
        assert not [step for *_, step in plan if step.startswith("SCAN") and "anon_" not in step], statement
        assert not [step for *_, step in plan if "trajectories_by_run" in step], statement
    index = "SEARCH trajectories USING COVERING INDEX trajectories_by_run (run=?"
    # Behind where the row stands whose id was given; and the lines of a page by their ids.
    assert f"{index} AND (iteration,slot,id)>(?,?,?))" in found and f"{index})" in found
    assert all(
        "COVERING INDEX trajectories_by_run" in step or "(id=?)" in step or "(group_id=?)" in step for step in found
    ), found


CALL = ToolCall("lookup", {"key": "é1"}, "call-0")


@pytest.mark.parametrize(
    ("conversation", "prompt", "answer"),
    [
        (MESSAGES, "Where is the key?", "in the drawer"),
        ((Message("user", " two\n\n lines "), Message("assistant", "", tool_calls=(CALL,))), "two lines",
         'lookup({"key": "é1"})'),
        ((Message("user", "q"), Message("assistant", " ", reasoning="hm")), "q", "hm"),
        ((Message("system", "rules"), Message("assistant", "yes")), "rules", "yes"),
        ((Message("user", "q"), Message("tool", "done", author="env")), "q", None),
        # An earlier conversation that the task brings along is part of what was asked.
        ((Message("user", "old"), Message("assistant", "older", author="history"), Message("user", "new"),
          Message("assistant", "newer", author="llm")), "new", "newer"),
        ((), None, None),
        ((Message("user", "ab " * 1000), Message("assistant", "x" * 201)), ("ab " * 67)[:MOST_SHORT] + "...",
         "x" * MOST_SHORT + "..."),
    ],
)  # fmt: skip
def test_prompt_is_the_last_question_before_the_first_reply_and_answer_the_last_reply(
    conversation: Sequence[Message], prompt: str | None, answer: str | None
) -> None:
    assert shorten_conversations([conversation]) == [{"prompt": prompt, "answer": answer}]


def test_what_is_gone_or_damaged_is_not_known(tmp_path: Path) -> None:
    store = new_store(tmp_path / "replay.sqlite")
    put(store, *[trajectory(name, slot=slot) for slot, name in enumerate("abc")])
    sql(store, "delete from messages where trajectory = 'b'")
    sql(store, "update messages set checksum = checksum + 1 where trajectory = 'c'")
    none = {"prompt": None, "answer": None}
    known = {"prompt": "Where is the key?", "answer": "in the drawer"}
    assert questions.excerpts(store, ["c", "nobody", "a", "b"]) == {"c": none, "nobody": none, "a": known, "b": none}


# How rows are spread


@pytest.mark.parametrize(
    "query",
    [
        *(Query(), Query(RUN), Query(UNPUBLISHED), Query(RUN, ("success",)), Query(RUN, ("num_tokens > 1000",))),
        Query(None, ("reward > 0.2", "group_success > 0.4 or staleness == 1")),
    ],
)
def test_every_bar_counts_the_rows_that_its_filter_chooses(two_runs: ReplayStore, query: Query) -> None:
    answer = questions.distributions(two_runs, query)
    assert json.loads(json.dumps(answer)) == answer
    total = len(questions.page(two_runs, query, limit=100)["rows"])
    assert answer["total"] == total
    assert list(answer["fields"]) == ["reward", "num_tokens", "staleness", "uses", "group_success", "num_turns"]
    for name, field in answer["fields"].items():
        assert field["unknown"] + sum(bar["count"] for bar in field["bars"]) == total
        asked = {bar["filter"]: bar["count"] for bar in field["bars"]}
        assert len(asked) == len(field["bars"])
        if field["unknown"]:
            asked[f"{name} is None"] = field["unknown"]
        for filter, count in asked.items():
            narrower = Query(query.run, (*query.filters, filter))
            assert len(questions.page(two_runs, narrower, limit=100)["rows"]) == count


def test_few_values_have_a_bar_each_and_many_share_round_ones(two_runs: ReplayStore) -> None:
    fields = questions.distributions(two_runs, Query(RUN))["fields"]
    rewards = [f"reward == {text}" for text in ("0", "0.25", "0.5", "0.75")]
    assert [bar["filter"] for bar in fields["reward"]["bars"]] == rewards
    # 1 to 30 tokens: (30 - 1) / 12 = 2.4, and the next round width is 5.
    shown = [(bar["low"], bar["high"]) for bar in fields["num_tokens"]["bars"]]
    assert shown == [(low, low + 5) for low in range(0, 35, 5)]
    ages = Counter(NEWEST - index % 4 for index in range(SIZE))
    assert {bar["low"]: bar["count"] for bar in fields["staleness"]["bars"]} == ages
    assert fields["staleness"]["unknown"] == 0


def test_choices_are_counted_and_staleness_is_that_of_the_buffer(two_runs: ReplayStore) -> None:
    choices = questions.distributions(two_runs, Query())["choices"]
    assert list(choices["source"].items()) == [("self", 23), ("hindsight", 22)]  # the most frequent first
    assert choices["stop_reason"] == {"final": 15, "error": 15, "NUL \x00 within": 15}
    assert choices["run"] == {RUN: 30, UNPUBLISHED: 15}
    for run in (RUN, None):
        answer = questions.distributions(two_runs, Query(run, ("reward > 0.1",)))
        assert answer["staleness"] == questions.summary(two_runs, run, filter="reward > 0.1")["staleness"]
    # What was said would be read in every conversation.
    asked = Query(RUN, ("success and (tool == 'lookup' or reward > 0)",))
    assert set(questions.distributions(two_runs, asked).values()) == {None}


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
    bars = bars_of("reward", sorted(values), whole=False)
    assert 1 <= len(bars) <= 13
    inside = [sum(eval(bar["filter"], {"reward": value}) for value in values) for bar in bars]  # noqa: S307
    assert sum(inside) == len(values)
    if len(values) > 12:
        assert all(earlier["high"] == later["low"] for earlier, later in itertools.pairwise(bars))
    for bar in bars:
        condition(bar["filter"])
