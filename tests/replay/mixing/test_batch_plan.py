import itertools
import json
from collections import Counter
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay import make_sampler
from replay.mixing.apportion import Remainders, apportion, group_sizes
from replay.mixing.batch_plan import BatchPlan, Mixer
from replay.mixing.mix_settings import MixRule, Schedule, StartRule
from replay.mixing.request import Availability, Pick
from replay.storage.databases import Location
from tests.fakes.records import Fresh, new_store, request

GROUP = 4
BATCH = 24
POOL = [f"task-{number}" for number in range(9)]
PLENTY = Availability(
    rows=10_000,
    by_source={"self": 5_000, "teacher": 5_000},
    by_task=dict.fromkeys(POOL, 1_000),
    by_source_task={(source, task): 500 for source in ("self", "teacher") for task in POOL},
    groups={GROUP: 1_000},
    by_source_groups={("self", GROUP): 500, ("teacher", GROUP): 500},
)
SCHEDULES = {
    "constant": lambda first: Schedule(),
    "linear": lambda first: Schedule(shape="linear", final=0.0),
    "cosine": lambda first: Schedule(shape="cosine", final=first / 2, begin=0.1, end=0.9),
    "step": lambda first: Schedule(shape="step", steps=((0.25, first / 3), (0.75, first))),
}


def rule_of(unit: str, fraction: float, **more: Any) -> MixRule:
    sizes = {"trajectories": BATCH, "group_size": GROUP, "iterations": 100, "task_members": GROUP}
    return MixRule(**{**sizes, "unit": unit, "fraction": fraction, **more})


def plans(mixer: Mixer, count: int, available: Availability = PLENTY, *, first: int = 1) -> list[BatchPlan]:
    """Consecutive iterations, tasks taken from the pool one after another."""
    tasks = itertools.islice(itertools.cycle(POOL), (first - 1) * mixer.num_tasks, None)
    return [
        mixer.plan(iteration=at, available=available, tasks=list(itertools.islice(tasks, mixer.num_tasks)))
        for at in range(first, first + count)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shortfall", ["fresh", "shrink"])
@pytest.mark.parametrize("unit", ["any", "trajectory", "task", "group"])
@pytest.mark.parametrize("fraction", [0.0, 1 / 3, 0.5, 0.9])
def test_composition_is_the_rule_over_100_iterations(fraction: float, unit: str, shortfall: str, schedule: str) -> None:
    rule = rule_of(unit, fraction, schedule=SCHEDULES[schedule](fraction), shortfall=shortfall)
    declared, given = Fraction(0), 0
    grain = GROUP if unit in ("task", "group") else 1
    for iteration, plan in enumerate(plans(Mixer(rule), 100), start=1):
        declared += BATCH * Fraction(rule.fraction_at(iteration))
        given += plan.replay
        assert plan.replay == plan.planned_replay
        assert plan.fresh == plan.planned_fresh == BATCH - plan.replay
        assert abs(given - declared) <= Fraction(grain, 2)  # at every iteration, so at the last


@pytest.mark.parametrize("unit", ["any", "group"])
@pytest.mark.parametrize(
    ("shortfall", "mode", "fresh"),
    [("fresh", "train", 24 - 4), ("shrink", "train", 12), ("fresh", "observe", 24), ("shrink", "observe", 24)],
)
def test_what_the_buffer_lacks_follows_the_shortfall_rule(unit: str, shortfall: str, mode: str, fresh: int) -> None:
    mixer = Mixer(rule_of(unit, 0.5, shortfall=shortfall, mode=mode))
    (plan,) = plans(mixer, 1, Availability(rows=4, groups={4: 1}))
    assert (plan.planned_replay, plan.replay, plan.shortfall) == (12, 4, 8)
    assert plan.fresh == fresh
    assert mixer.starved_iterations == 1


@pytest.mark.parametrize("fraction", [1 / 3, 0.5, 0.9])
def test_unit_trajectory_replays_as_many_members_of_every_group(fraction: float) -> None:
    for iteration, plan in enumerate(plans(Mixer(rule_of("trajectory", fraction)), 30)):
        tasks = [POOL[(iteration * 6 + slot) % 9] for slot in range(6)]
        fresh, drawn = dict(plan.groups), Counter({pick.task: pick.count for pick in plan.picks})
        assert [fresh.get(slot, 0) + drawn[task] for slot, task in enumerate(tasks)] == [GROUP] * 6
        assert max(drawn[task] for task in tasks) - min(drawn[task] for task in tasks) <= 1


HALVES = {"self": 0.5, "earlier-run": 0.5}
Groups = tuple[tuple[int, int], ...]
SCARCE: list[tuple[MixRule, Availability, tuple[Pick, ...], Groups]] = [
    # 2 of every 4: what a task has, and the rest is collected.
    (rule_of("trajectory", 0.5), Availability(rows=12, by_task={"task-0": 1, "task-1": 9, "task-2": 2}),
     (Pick(1, task="task-0"), Pick(2, task="task-1"), Pick(2, task="task-2")),
     ((0, 3), (1, 2), (2, 2), (3, 4), (4, 4), (5, 4))),
    # 2 of 24, none of most groups: the odd members go to tasks that have them.
    (rule_of("trajectory", 1 / 12), Availability(rows=9, by_task={"task-3": 1, "task-5": 8}),
     (Pick(1, task="task-3"), Pick(1, task="task-5")), ((0, 4), (1, 4), (2, 4), (3, 3), (4, 4), (5, 3))),
    # 2 of 6 groups, replayed whole, are those whose task is stored; they take their slots all the same.
    (rule_of("task", 1 / 3), Availability(rows=99, by_task={"task-1": 3, "task-2": 4, "task-4": 50}),
     (Pick(4, task="task-2"), Pick(4, task="task-4")), ((0, 4), (1, 4), (3, 4), (5, 4))),
    # A row that two sources fit is planned once.
    (rule_of("any", 0.5, sources=HALVES), Availability(rows=9, by_source={"self": 9, "earlier-run": 9}),
     (Pick(6, "self"), Pick(3, "earlier-run")), ((0, 4), (1, 4), (2, 4), (3, 3))),
    # A source that is empty is not filled by the other.
    (rule_of("any", 0.5, sources={"self": 0.75, "teacher": 0.25}), Availability(rows=50, by_source={"self": 50}),
     (Pick(9, "self"),), ((0, 4), (1, 4), (2, 4), (3, 3))),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "stock", "picks", "groups"), SCARCE)
def test_scarce_rows_go_by_rule(rule: MixRule, stock: Availability, picks: tuple[Pick, ...], groups: Groups) -> None:
    (plan,) = plans(Mixer(rule), 1, stock)
    assert (plan.picks, plan.groups) == (picks, groups)
    assert plan.num_tasks == (6 if rule.unit != "any" else len(groups))


@pytest.mark.parametrize("fraction", [0.25, 1 / 3, 0.5])
def test_unit_task_replays_the_stated_members_of_some_groups_and_none_of_the_others(fraction: float) -> None:
    rule = rule_of("task", fraction, task_members=3)
    mixed = 0
    for iteration, plan in enumerate(plans(Mixer(rule), 30), start=1):
        assert all(pick.count == 3 for pick in plan.picks)
        assert Counter(size for _, size in plan.groups) == Counter({1: len(plan.picks), 4: 6 - len(plan.picks)})
        mixed += len(plan.picks)
        assert abs(3 * mixed - iteration * 24 * fraction) <= 1.5


@pytest.mark.parametrize("unit", ["any", "trajectory", "task", "group"])
def test_sources_share_the_replayed_rows_as_declared(unit: str) -> None:
    mixer = Mixer(rule_of(unit, 0.5, sources={"self": 0.7, "teacher": 0.3}))
    drawn = Counter[str]()
    for iteration, plan in enumerate(plans(mixer, 100), start=1):
        drawn.update({str(pick.source): 0 for pick in plan.picks})
        for pick in plan.picks:
            drawn[str(pick.source)] += pick.count
        assert plan.replay == plan.planned_replay == sum(plan.planned_sources.values())
        if unit in ("any", "trajectory"):
            assert abs(drawn["teacher"] - 0.3 * 12 * iteration) <= 1
    assert abs(drawn["teacher"] - 360) <= (4 if unit == "group" else 1)  # 0.3 of 1,200 rows


def stock_of(by_task: list[int], groups: int, rows: int) -> Availability:
    """Each source has half of every task's rows."""
    named = dict(zip(POOL, by_task, strict=True))
    halves = [("self", 0), ("teacher", 1)]
    return Availability(
        rows=rows,
        by_source={source: (rows + one) // 2 for source, one in halves},
        by_task=named,
        by_source_task={(source, task): (count + one) // 2 for task, count in named.items() for source, one in halves},
        groups={GROUP: groups, 3: 9},
        by_source_groups={(source, GROUP): (groups + one) // 2 for source, one in halves},
    )


stocks = st.builds(stock_of, st.lists(st.integers(0, 6), min_size=9, max_size=9), st.integers(0, 4), st.integers(0, 30))


@given(
    st.sampled_from(["any", "trajectory", "task", "group"]),
    st.sampled_from(["fresh", "shrink"]),
    st.sampled_from([{}, {"self": 0.5, "teacher": 0.5}]),
    st.floats(0, 1),
    st.lists(st.tuples(stocks, st.lists(st.sampled_from(POOL), min_size=6, max_size=6)), max_size=8),
)
def test_whatever_the_buffer_has_batches_are_well_formed(
    unit: str, shortfall: str, sources: Any, fraction: float, iterations: list[tuple[Availability, list[str]]]
) -> None:
    mixer = Mixer(rule_of(unit, fraction, shortfall=shortfall, sources=sources))
    for iteration, (stock, tasks) in enumerate(iterations, start=1):
        plan = mixer.plan(iteration=iteration, available=stock, tasks=tasks[: mixer.num_tasks])
        assert plan.planned_fresh + plan.planned_replay == BATCH
        assert plan.shortfall >= 0
        total = plan.fresh + plan.replay
        assert total == BATCH if shortfall == "fresh" else 0 < total <= BATCH
        assert all(0 < size <= GROUP for _, size in plan.groups)
        drawn, by_source = Counter[Any](), Counter[Any]()
        for pick in plan.picks:
            drawn[pick.task] += pick.count
            by_source[pick.source, pick.task] += pick.count
        if unit in ("any", "group"):
            assert plan.replay <= (stock.rows if unit == "any" else GROUP * stock.groups[GROUP])
            assert [slot for slot, _ in plan.groups] == list(range(plan.num_tasks))
            continue
        assert all(count <= stock.by_task[task] for task, count in drawn.items())
        assert not sources or all(count <= stock.by_source_task[key] for key, count in by_source.items())
        fresh = dict(plan.groups)
        for task in set(tasks):  # a task may fill several slots
            slots = [slot for slot, other in enumerate(tasks) if other == task]
            members = drawn[task] + sum(fresh.get(slot, 0) for slot in slots)
            assert members == len(slots) * GROUP if shortfall == "fresh" else 0 < members <= len(slots) * GROUP


START: list[tuple[dict[str, Any], list[int]]] = [
    ({"start": StartRule(iteration=3)}, [0, 0, 12, 12]),
    ({"start": StartRule(success_rate=0.3, iteration=3)}, [0, 0, 12, 12]),  # reached once, in iteration 2
    ({"start": StartRule(buffer=20)}, [0, 12, 6, 12]),  # it goes on when the buffer falls
]


@pytest.mark.parametrize(("rule", "counts"), START)
def test_replay_starts_when_its_rule_holds_and_goes_on(rule: dict[str, Any], counts: list[int]) -> None:
    mixer, drawn = Mixer(rule_of("any", 0.5, **rule)), []
    for iteration, (success, rows) in enumerate([(0.2, 19), (0.3, 20), (0.1, 6), (None, 99)], start=1):
        stock = Availability(rows=rows if mixer.rule.start.buffer else 99)
        drawn += [plan.replay for plan in plans(mixer, 1, stock, first=iteration)]
        mixer.observe_iteration(success_rate=success)
    assert drawn == counts


def test_a_resumed_mixer_goes_on_like_the_unbroken_one() -> None:
    def observed(mixer: Mixer, first: int, count: int) -> list[BatchPlan]:
        made = []
        for iteration in range(first, first + count):
            made += plans(mixer, 1, first=iteration)
            mixer.observe_iteration(success_rate=iteration / 40)
        return made

    for unit in ("any", "trajectory", "task", "group"):
        rule = rule_of(
            unit,
            0.9,
            schedule=SCHEDULES["cosine"](0.9),
            sources={"self": 0.7, "teacher": 0.3},
            start=StartRule(success_rate=0.1, iteration=3),
        )
        unbroken, broken = Mixer(rule), Mixer(rule)
        whole = observed(unbroken, 1, 40)
        begun = observed(broken, 1, 17)
        resumed = Mixer(rule)
        resumed.load_state(json.loads(json.dumps(broken.state())))
        assert begun + observed(resumed, 18, 23) == whole


@pytest.mark.parametrize(
    ("total", "shares", "parts"),
    [
        (10, [1 / 3, 1 / 3, 1 / 3], [4, 3, 3]),  # of equal remainders the first
        (5, [2, 1], [3, 2]),  # quotas 3.33 and 1.67
        (0, [1.0], [0]),
    ],
)
def test_apportion_rounds_by_largest_remainder(total: int, shares: list[float], parts: list[int]) -> None:
    assert apportion(total, shares) == parts


shares_of_some = st.lists(st.floats(0, 10), min_size=1, max_size=6).filter(any)


@given(st.integers(0, 500), shares_of_some)
def test_apportion_sums_exactly_and_stays_within_one_of_each_quota(total: int, shares: list[float]) -> None:
    parts = apportion(total, shares)
    exact = [Fraction(share) for share in shares]
    assert sum(parts) == total
    assert all(abs(part - total * share / sum(exact)) < 1 for part, share in zip(parts, exact, strict=True))


@given(st.lists(st.tuples(st.integers(0, 300), st.floats(0, 1)), max_size=40))
def test_sums_of_two_carried_parts_stay_within_half_of_the_declared_ones(calls: list[tuple[int, float]]) -> None:
    remainders, declared, given_ = Remainders(), Fraction(0), 0
    for total, share in calls:
        first, second = remainders.split("replay", total, [1 - Fraction(share), Fraction(share)])
        assert min(first, second) >= 0
        assert first + second == total
        declared += total * Fraction(share)
        given_ += second
        assert abs(given_ - declared) <= Fraction(1, 2)


@given(shares_of_some, st.lists(st.integers(0, 30), max_size=40))
def test_sums_of_many_carried_parts_follow_the_shares(shares: list[float], totals: list[int]) -> None:
    remainders = Remainders()
    exact = [Fraction(share) / sum(map(Fraction, shares)) for share in shares]
    sums = [0] * len(shares)
    for total in totals:
        parts = remainders.split("sources", total, shares)
        assert sum(parts) == total
        assert min(parts) >= 0
        sums = [before + part for before, part in zip(sums, parts, strict=True)]
    assert all(abs(part - sum(totals) * share) < 2 for part, share in zip(sums, exact, strict=True))


@pytest.mark.parametrize(
    ("fresh", "size", "sizes"),
    [(96, 8, [8] * 12), (85, 8, [8] * 8 + [7] * 3), (9, 8, [5, 4]), (1, 8, [1]), (0, 8, []), (13, 1, [1] * 13)],
)
def test_group_sizes_are_as_even_as_possible(fresh: int, size: int, sizes: list[int]) -> None:
    assert group_sizes(fresh, size) == sizes


def test_schedule_reaches_both_ends_exactly_and_one_iteration_is_its_beginning() -> None:
    for shape in ("linear", "cosine"):
        schedule = Schedule(shape=shape, final=0.7)
        assert [schedule.share_at(0.1, at, 5) for at in (1, 5)] == [0.1, 0.7]
        assert schedule.share_at(0.1, 1, 1) == 0.1
        assert (schedule.highest_share(0.1), schedule.highest_share(0.9)) == (0.7, 0.9)
    assert Schedule(shape="step", steps=((0.1, 0.4), (0.2, 0.1))).highest_share(0.2) == 0.4


def test_picks_draw_groups_of_the_stated_size(location: Location) -> None:
    with closing(new_store(location)) as store:
        Fresh(1, rates=(0.5, 0.25)).append_to(store)
        Fresh(2, rates=(0.5,), size=2).append_to(store)
        sampler = make_sampler("uniform", 0)
        available = store.available(request(3, 1), sampler)
        assert available.groups == {4: 2, 2: 1}
        small = replace(request(3, 1), picks=(Pick(4, unit="group", size=2),), first_slot=20)
        assert [row.trajectory.record.iteration for row in store.draw(small, sampler)] == [2, 2]
