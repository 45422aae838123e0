"""What episodes cost, which of them stand out, and what they did with tools, counted by hand."""

from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from context.authors import ENV, LLM, TEMPLATE, USER
from context.messages import Message, ToolCall
from context.tokens.token_sequence import Segment
from replay import ReplayStore
from replay.questions.cost import cost
from replay.questions.outliers import duplicates, outliers
from replay.questions.tools import UNREADABLE, tools
from tests.fakes.records import RUN, add_draw, put, set_state, sql, tokens, trajectory

pytestmark = pytest.mark.every_database


def said(ids: list[int]) -> tuple[Segment, ...]:
    """A prompt of two tokens and a reply."""
    return (Segment(tokens([5, 6, *ids], [TEMPLATE, USER, *[LLM] * len(ids)])),)


def test_cost_counts_generated_and_trained_tokens_seconds_and_money(store: ReplayStore) -> None:
    for number, (length, success) in enumerate([(10, True), (20, False), (40, True), (7, True)]):
        place: dict[str, Any] = {"group": f"g{number}", "slot": number, "iteration": 1 + number // 2}
        given = {"success": success, "reward": float(success), "num_turns": 1 + number}
        put(store, trajectory(f"row-{number}", segments=said([9] * length), **place, **given))
    set_state(store, "row-3", "orphaned")
    for slot, id in enumerate(("row-0", "row-0", "row-1")):
        add_draw(store, id, iteration=1 + slot // 2, slot=slot)
    store.add_metrics(RUN, 0, {"time/warm_up": 600.0, "time/evaluation": 300.0})
    store.add_metrics(RUN, 1, {"time/iteration": 2700.0})
    found = cost(store, RUN, price_hour=3.0, price_million=1e6)
    # An hour at 3, and 70 tokens at 1 each.
    spent = {"generated_tokens": 70, "trained_tokens": 40, "seconds": 3600.0, "money": 73.0}
    assert {name: found["total"][name] for name in spent} == spent
    assert found["total"]["per_success"] == {name: value / 2 for name, value in spent.items()}
    first, second = found["iterations"]
    assert first["num_action_tokens"] == {"p10": 11.0, "p50": 15.0, "p90": 19.0}
    assert first["reward_shares"] == {"0": 0.5, "1": 0.5}
    assert (second["trained_tokens"], second["seconds"], second["money"]) == (20, None, None)


def test_cost_includes_evicted_episodes_whose_turns_are_not_known(store: ReplayStore) -> None:
    put(store, trajectory("row-0", segments=said([9] * 10)))
    add_draw(store, "row-0")
    before = cost(store, RUN)["total"]
    store.prune(rows=sa.true(), dry_run=False)
    after = cost(store, RUN)
    assert after["total"] == before and before["trained_tokens"] == 10
    assert after["iterations"][0]["num_turns"] == {"p10": None, "p50": None, "p90": None}


def test_outliers_are_rewards_far_from_their_tasks_others_and_much_shorter_successes(store: ReplayStore) -> None:
    for number in range(24):
        reward = {5: 50.0, 7: 0.5}.get(number, 1.0)
        row = trajectory(f"row-{number:02}", segments=said([9] * 30), slot=number, reward=reward)
        put(store, replace(row, record=replace(row.record, group=f"g{number}")), size=1, reward_std=0.0,
            reward_mean=row.record.reward)  # fmt: skip
    for number, length in ((24, 14), (25, 15)):
        id = f"row-{number}"
        put(store, trajectory(id, segments=said([9] * length), group=id, iteration=2, task="other"))
    found = outliers(store, RUN)
    ((id, others, gap),) = [(row["id"], row["others"], row["gap"]) for row in found["far"]]
    assert (id, others, gap) == ("row-05", 23, pytest.approx(50.0 - 22.5 / 23))
    # 14 of 30 tokens are less than half, 15 are not.
    assert [(row["id"], row["shortest_before"]) for row in found["short"]] == [("row-24", 30)]


def test_rare_success_among_rewards_of_two_values_is_no_outlier(store: ReplayStore) -> None:
    for number in range(24):
        row, reward = trajectory(f"row-{number}", group=f"g{number}", slot=number), float(number == 5)
        put(store, replace(row, record=replace(row.record, reward=reward)), size=1, reward_std=0.0, reward_mean=reward)
    assert outliers(store, RUN)["far"] == []


def test_duplicates_are_rows_with_the_same_token_ids(store: ReplayStore) -> None:
    for number, ids in enumerate([[1, 2], [1, 2], [2, 1], [1, 2, 3]]):
        put(store, trajectory(f"row-{number}", segments=said(ids), group=f"g{number}", slot=number))
    for slot, number in enumerate((0, 1, 1, 2)):
        add_draw(store, f"row-{number}", slot=slot)
    replayed = {"replays": 4, "rows_replayed": 3, "different_replayed": 2, "most_used": 3}
    assert duplicates(store, RUN) == {"rows": 4, "different": 3, "most_stored": 2, **replayed}
    sql(store, "delete from segments where trajectory = 'row-2'")
    assert duplicates(store, RUN)["rows"] == 3


def test_tools_count_calls_errors_repeats_and_success_with_each(store: ReplayStore) -> None:
    def call(*calls: ToolCall) -> Message:
        return Message("assistant", "", author=LLM, tool_calls=calls)

    def answer(id: str | None = None, error: str | None = None) -> Message:
        return Message("tool", "", author=ENV, name="any", tool_call_id=id, error_kind=error)

    add, look = ToolCall("add", {"n": 1}, "a"), ToolCall("look", {"at": "x"}, "b")
    talks = {
        "row-0": [call(add, look), answer("b", "raised"), answer("a"), call(add), answer("a")],
        "row-1": [call(), answer(error="malformed"), call(replace(add, id=None)), answer()],
        "row-2": [call(look)],
    }
    for number, (id, talk) in enumerate(talks.items()):
        place = {"group": id, "slot": number, "iteration": 1 + number // 2}
        # The second malformed call ended its episode: no message has it.
        kinds = (None, "malformed malformed", None)[number]
        row = trajectory(id, messages=tuple(talk), success=not number, error_kinds=kinds, **place)
        put(store, row)
    store.add_metrics(RUN, 1, {"time/tool/add": 2.0})
    found = tools(store, RUN)
    by_name = {tool.pop("name"): tool for tool in found["tools"]}
    facts = {"calls": 3, "repeated": 1, "errors": {}, "episodes": 2, "share": 2 / 3, "with_tool": 0.5, "without": 0.0}
    assert by_name["add"] == {**facts, "seconds_p50": 2.0, "seconds_p95": 2.0}
    # The answer of an id is of its call, whatever the order; one without a call was of an unreadable one.
    assert by_name["look"]["errors"] == {"raised": 1} and by_name["look"]["seconds_p50"] is None
    assert by_name[UNREADABLE]["errors"] == {"malformed": 2}
    first, second = found["iterations"]
    assert first["calls"] == 3 and first["errors"] == {"raised": 1 / 6, "malformed": 2 / 6}
    assert second["using"] == {"add": 0.0, "look": 1.0, UNREADABLE: 0.0}
    assert (tools(store, RUN, most=2)["read"], found["read"], found["episodes"]) == (1, 3, 3)
