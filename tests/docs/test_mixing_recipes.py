"""Every recipe of the page on mixing draws what it says, from a buffer that has some of everything."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from agentloop.algorithms.baselines.grpo import group_advantages
from agentloop.config.config_file import load_config, to_plain
from agentloop.user_code import load_sampler
from replay import DrawRequest, ReplayStore
from replay.config import StoredConfig
from replay.mixing.batch_plan import Mixer
from replay.records import HINDSIGHT, group_of
from tests.docs.blocks import ROOT, blocks, table
from tests.fakes.records import RUN, Fresh, add_run, new_store, policy, task

PAGE = ROOT / "docs/mixing.md"
SMALL = ["run.iterations=20", "batch.trajectories=32", "batch.group_size=8", "batch.mini_batch=32"]
"""A quarter of the default batch; nothing else of a recipe is changed."""
COLLECTED, FIRST = 5, 8
"""Iterations that the run has rows of, and the first one that draws: no schedule has ended by then."""
TASKS = [f"task-{number}" for number in range(14)]
RATIOS = {"exp_ratio / n": "0.0625", "1/n": "0.125"}
"""Of groups of 8, with an `exp_ratio` of 0.5."""


def recipes() -> Iterator[tuple[str, str]]:
    """Name and YAML of each: the blocks of the page, its ratios of others, and its samplers."""
    for block in blocks():
        mixes = block.language == "yaml" and "fraction:" in block.text
        if mixes and block.place.startswith(("docs/mixing.md", "docs/replay.md")):
            yield block.place, block.text
    for row in table(PAGE, "is here"):
        cell = row["is here"]
        for name, share in RATIOS.items():
            cell = cell.replace(name, share)
        keys = [key for key in re.findall("`([^`]+)`", cell) if ": " in key]
        given = [] if "fraction" in "".join(keys) else ["fraction: 0.5"]
        yield row["elsewhere"], f"environment: {{task_pool: 14}}\nreplay: {{{', '.join([*keys, *given])}}}\n"
    for row in table(PAGE, "`sampler`"):
        name = row["`sampler`"].strip("`")
        yield name, f"replay: {{fraction: 0.5, sampler: {name}}}\n"
    yield "a sampler of one's own", "replay: {fraction: 0.5, sampler: 'examples/long_first.py:LongFirst'}\n"


def stored(store: ReplayStore, rows: Fresh, tasks: list[str]) -> None:
    """Rows with groups as they are made of members, each of the next of the tasks."""
    members, groups = [], []
    for number, (_, group) in enumerate(groupby(rows.trajectories, key=lambda row: row.record.group)):
        given = list(group)
        advantages = group_advantages([row.record.reward for row in given], True)
        if rows.source == HINDSIGHT:
            advantages = [1.0]
        name = tasks[number % len(tasks)]
        made = [
            replace(row, record=replace(row.record, task=name, advantage=advantage))
            for row, advantage in zip(given, advantages, strict=True)
        ]
        members += made
        groups.append(group_of(made))
    store.append([task(name) for name in tasks], groups, members)


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayStore]:
    """Mixed, solved and hopeless groups of the run, its hindsight, another run's rows, and a teacher's."""
    path = tmp_path_factory.mktemp("run") / "replay.sqlite"
    with closing(add_run(new_store(path), "run-0")) as store:
        for iteration in range(1, COLLECTED + 1):
            store.add_policy(policy(iteration))
            rates = (0.5,) * 12 + (1.0, 0.0)
            stored(store, Fresh(iteration, rates, size=8), TASKS)
        stored(store, Fresh(COLLECTED, (1.0,) * 40, size=1, attempt=1, source=HINDSIGHT), ["of hindsight"])
        for iteration, source in enumerate(("earlier", "teacher"), start=1):
            stored(store, Fresh(iteration, (0.5,) * 12, size=8, run="run-0", source=source), TASKS)
        yield store


@pytest.mark.parametrize("recipe", [text for _, text in recipes()], ids=[name for name, _ in recipes()])
def test_it_draws_its_plan(recipe: str, buffer: ReplayStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    config = StoredConfig.model_validate(to_plain(load_config(tmp_path / "recipe.yaml", SMALL)))
    replay = config.replay
    mixer, sampler = Mixer(config.mix_rule()), load_sampler(replay.sampler, 0, replay.sampler_options)
    mixer.observe_iteration(success_rate=0.5)
    drawn, planned = Counter[str](), Counter[str]()
    for iteration in range(FIRST, FIRST + 3):
        request = DrawRequest(RUN, iteration, COLLECTED, limits=replay.limits)
        available = buffer.available(request, sampler)
        plan = mixer.plan(iteration=iteration, available=available, tasks=TASKS[: mixer.num_tasks])
        planned += Counter(plan.planned_sources)
        planned["all"] += plan.planned_replay
        rows = buffer.draw(replace(request, picks=plan.picks), sampler)
        drawn += Counter(row.trajectory.record.source for row in rows)
        drawn["all"] += len(rows)
    assert planned["all"] > 0
    assert {name: drawn[name] for name in planned} == planned
    assert set(replay.sources) <= set(planned)
