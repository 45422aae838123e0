from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from context.tokens.token_sequence import Segment
from replay import queries
from replay.queries.iteration import lineage_up_to
from replay.queries.trajectory import lineage_of
from replay.records import FRESH, REPLAY
from replay.sampling.samplers import make_sampler
from replay.storage.databases import Location
from replay.store import ReplayStore
from tests.fakes.records import (
    ENV,
    LLM,
    RUN,
    TEMPLATE,
    USER,
    group,
    iterate,
    new_store,
    request,
    run_record,
    sql,
    task,
    tokens,
    trajectory,
)
from tests.fakes.replay_command import ask

WHO = [TEMPLATE, USER, LLM, LLM, ENV, LLM]


def trained(location: Location) -> ReplayStore:
    store = new_store(location)
    sampler = make_sampler("uniform", 3)
    for iteration in (1, 2, 3):
        iterate(store, iteration, sampler, count=3)
    return store


def test_lineage_of_an_iteration_is_its_committed_draws(location: Location) -> None:
    store = trained(location)
    store.draw(request(4, 2), make_sampler("uniform", 1))
    answer = queries.iteration(store, RUN, 3)
    plain = "select slot, stream, trajectory from draws where iteration = 3 and state = 'committed' order by 1"
    assert [(row["slot"], row["stream"], row["trajectory"]) for row in answer["trajectories"]] == sql(store, plain)
    assert (answer["fresh"], answer["replay"], answer["policy_version"], answer["makes_policy_version"]) == (8, 3, 2, 3)
    for row in answer["trajectories"]:
        born = sql(store, "select iteration, reward from trajectories where id = ?", row["trajectory"])
        assert [(row["collected_iteration"], row["reward"])] == born
        # 16 rows could be drawn, all alike.
        assert row["probability"] == (None if row["stream"] == FRESH else 1 / 16)
        assert (row["stream"] == FRESH) == (row["collected_iteration"] == 3)


def test_lineage_of_a_trajectory_is_every_update_that_used_it(location: Location) -> None:
    store = trained(location)
    ((id, uses),) = sql(store, "select trajectory, count(*) from draws group by 1 order by 2 desc, 1 limit 1")
    answer = lineage_of(store, str(id)[:9])
    names = ("iteration", "slot", "stream", "staleness", "drift_mean", "ess_share", "clip_fraction")
    plain = f"select {', '.join(names)} from draws where trajectory = ? order by 1, 2"
    assert [tuple(use[name] for name in names) for use in answer["uses"]] == sql(store, plain, id)
    assert len(answer["uses"]) == uses >= 2
    assert [use["makes_policy_version"] for use in answer["uses"]] == [use["iteration"] for use in answer["uses"]]
    assert answer["uses"][0]["stream"] == FRESH
    assert {use["stream"] for use in answer["uses"][1:]} == {REPLAY}


def test_lineage_survives_forgetting(location: Location) -> None:
    store = trained(location)
    ((id,),) = sql(store, "select trajectory from draws where stream = 'replay' order by 1 limit 1")
    before = lineage_of(store, str(id))
    store.close()
    ask("forget", str(location), "--where", f"id == '{id}'", "--yes")
    store = ReplayStore.open(location, read_only=True)
    after = lineage_of(store, str(id))
    store.close()
    assert (after.pop("state"), after.pop("state_reason")) == ("evicted", "forgotten")
    assert {name: before[name] for name in after} == after


def test_lineage_of_weights_is_all_they_have_learned_from(location: Location) -> None:
    answer = lineage_up_to(trained(location), RUN, 2)
    assert ([row["iteration"] for row in answer["iterations"]], answer["fresh"], answer["replay"]) == ([1, 2], 16, 3)
    # What was drawn in iteration 2 had been fresh in iteration 1.
    assert (answer["different"], len(answer["trajectories"])) == (16, 19)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with the checkpoints of iterations 2 and 3; that of 3 is not whole."""
    trained(tmp_path / "replay.sqlite").close()
    for number in (2, 3):
        (tmp_path / "checkpoints" / f"{number:06d}" / "model").mkdir(parents=True)
    (tmp_path / "checkpoints" / "000002" / "COMPLETE").touch()
    return tmp_path


def test_lineage_command_goes_both_ways_and_names_checkpoints(folder: Path) -> None:
    text = ask("lineage", "2", str(folder)).output
    assert f"iteration 2 of run {RUN}: 8 fresh, 3 drawn, 2 optimizer steps" in text
    assert "collected by policy 1, made policy 2" in text
    assert f"in checkpoint {folder}/checkpoints/000002" in text
    rows = [line.split() for line in text.splitlines()[5:]]
    assert [row[1] for row in rows] == ["fresh"] * 8 + ["replay"] * 3
    ((id,),) = sql(folder / "replay.sqlite", "select trajectory from draws where iteration = 2 and slot = 8")
    uses = ask("lineage", id, str(folder)).output
    assert f"iteration 1 made policy 1, in {folder}/checkpoints/000002" in uses
    answer = json.loads(ask("lineage", id, str(folder), "--json").output)
    held = {use["iteration"]: use["held_by"] for use in answer["uses"]}
    assert held.pop(3, None) is None
    assert set(held.values()) == {f"{folder}/checkpoints/000002"}


@pytest.mark.parametrize("inner", ["", "model"])
def test_lineage_takes_a_checkpoint_folder_and_finds_its_run(folder: Path, inner: str) -> None:
    text = ask("lineage", str(folder / "checkpoints" / "000002" / inner)).output
    assert text.startswith(f"after iteration 2 of run {RUN} (policy 2): 16 different trajectories, used 16 times fresh")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("9", "iteration must be a committed one, from 1 to 3, got 9."),
        ("zz", "ID must be the beginning of one trajectory's id"),
        (".", "WHAT must be a checkpoint's folder"),
    ],
)
def test_lineage_of_nothing_is_one_line(folder: Path, what: str, message: str) -> None:
    result = ask("lineage", what, str(folder))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert message in result.stderr


def test_lineage_of_a_database_of_several_runs_asks_which(location: Location) -> None:
    store = trained(location)
    store.add_run(run_record("run-2"))
    numbers = "planned_fresh, planned_replay, fresh, replay, fraction, optimizer_steps"
    sql(store, f"insert into iterations select 'run-2', iteration, policy_version, {numbers} from iterations")
    store.close()
    refused = ask("lineage", "1", str(location)).stderr
    assert "RUN must be one run of" in refused and "Give its folder, or its id with --run." in refused
    told = json.loads(ask("lineage", "1", str(location), "--run", RUN, "--json").output)
    assert told["run"] == RUN and told["trajectories"]
    of_a_trajectory = ask("lineage", told["trajectories"][0]["trajectory"], str(location), "--run", RUN)
    assert (of_a_trajectory.exit_code, of_a_trajectory.stderr[:20]) == (2, "agentloop: --run mus")


def pair(location: Location, second: Any) -> ReplayStore:
    store = new_store(location)
    first = trajectory("aa", segments=(Segment(tokens([5, 6, 7, 8, 9, 10], WHO)),))
    store.append([task()], [group()], [first, second])
    return store


def test_diff_marks_the_first_token_that_differs(location: Location) -> None:
    second = trajectory(
        "bb", slot=1, reward=0.5, segments=(Segment(tokens([5, 6, 7, 88, 9, 10], WHO, log_prob=-0.75)),)
    )
    pair(location, second).close()
    answer = json.loads(ask("diff", "aa", "bb", str(location), "--json").output)
    (segment,) = answer["segments"]
    first = segment["first_difference"]
    assert (segment["same"], first["index"], [token["token_id"] for token in first["tokens"]]) == (3, 3, [8, 88])
    # The one sampled token before it: -0.5 and -0.75.
    assert segment["log_prob_gap"] == 0.25
    assert answer["records"]["reward"] == [1.0, 0.5]
    assert "reward" in answer["different"] and "task" not in answer["different"]
    text = ask("diff", "aa", "bb", str(location)).output
    assert "the first 3 are the same, log-probs at most 0.2500 nats apart" in text
    assert "B > 88  (token 3, id 88, by llm, log-prob -1.500)" in text
    assert "the same messages" in text


def test_diff_sees_other_authors_and_missing_ends(location: Location) -> None:
    other = [TEMPLATE, USER, LLM, LLM, LLM, LLM]
    segments = (Segment(tokens([5, 6, 7, 8, 9, 10], other)), Segment(tokens([5], [LLM]), "clipped"))
    pair(location, trajectory("bb", slot=1, segments=segments)).close()
    first, second = json.loads(ask("diff", "aa", "bb", str(location), "--json").output)["segments"]
    assert [token["author"] for token in first["first_difference"]["tokens"]] == ["env", "llm"]
    assert (second["tokens"], second["first_difference"]["tokens"][0]) == ([0, 1], None)
    assert "A > ends before token 0" in ask("diff", "aa", "bb", str(location)).output


def test_diff_of_equal_tokens_says_so(location: Location) -> None:
    second = trajectory("bb", slot=1, segments=(Segment(tokens([5, 6, 7, 8, 9, 10], WHO, version=3)),))
    pair(location, second).close()
    answer = json.loads(ask("diff", "aa", "bb", str(location), "--json").output)
    assert (answer["same_tokens"], answer["segments"][0]["same"], answer["segments"][0]["log_prob_gap"]) == (
        True,
        6,
        0.0,
    )


def test_diff_of_one_with_itself_finds_nothing(location: Location) -> None:
    pair(location, trajectory("bb", slot=1)).close()
    output = ask("diff", "aa", "aa", str(location)).output
    assert output.startswith("the same record")
    assert "the first 6 are the same, log-probs at most 0.0000 nats apart" in output


def test_diff_of_two_runs_tells_numbers_and_configuration(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 7)):
        store = ReplayStore.create(tmp_path / name)
        store.add_run(replace(run_record(), config={"run": {"seed": seed}}))
        iterate_all(store, 1 + bool(seed))
        store.close()
    answer = json.loads(ask("diff", str(tmp_path / "one"), str(tmp_path / "two"), "--json").output)
    assert answer["numbers"]["trajectories"] == [8, 16]
    assert answer["numbers"]["draws.fresh"] == [8, 16]
    assert answer["config"] == {"run.seed": [0, 7]}
    text = ask("diff", str(tmp_path / "one"), str(tmp_path / "two")).output
    assert ["trajectories", "8", "16"] in [line.split() for line in text.splitlines()]
    assert ["run.seed", "0", "7"] in [line.split() for line in text.splitlines()]


def iterate_all(store: ReplayStore, iterations: int) -> None:
    for iteration in range(1, iterations + 1):
        iterate(store, iteration, make_sampler("uniform", 0), count=0)


@pytest.mark.parametrize("command", ["diff", "lineage"])
def test_help_has_an_example(command: str) -> None:
    assert f"Example: agentloop replay {command}" in ask(command, "--help").output
