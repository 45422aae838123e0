from __future__ import annotations

import json
from pathlib import Path

import pytest

from replay.questions.iteration import lineage_up_to
from replay.questions.trajectory import lineage_of
from replay.records import FRESH, REPLAY
from replay.storage.databases import Location
from tests.fakes.records import RUN, iterated, run_record, sql
from tests.fakes.replay_command import ask


def test_lineage_of_a_trajectory_is_every_update_that_used_it(location: Location) -> None:
    store = iterated(location, count=3)
    ((id, uses),) = sql(store, "select trajectory, count(*) from draws group by 1 order by 2 desc, 1 limit 1")
    answer = lineage_of(store, str(id)[:9])
    plain = "select iteration, slot, stream from draws where trajectory = ? order by 1, 2"
    assert [(use["iteration"], use["slot"], use["stream"]) for use in answer["uses"]] == sql(store, plain, id)
    assert len(answer["uses"]) == uses >= 2
    assert [use["makes_policy_version"] for use in answer["uses"]] == [use["iteration"] for use in answer["uses"]]
    assert [use["stream"] for use in answer["uses"]] == [FRESH, *[REPLAY] * (int(uses) - 1)]
    # It survives forgetting.
    ask("forget", location, "--where", f"id == '{id}'", "--yes")
    after = lineage_of(store, str(id))
    assert (after.pop("state"), after.pop("state_reason")) == ("evicted", "forgotten")
    assert {name: answer[name] for name in after} == after


def test_lineage_of_weights_is_all_they_have_learned_from(tmp_path: Path) -> None:
    answer = lineage_up_to(iterated(tmp_path / "replay.sqlite", count=3), RUN, 2)
    assert ([row["iteration"] for row in answer["iterations"]], answer["fresh"], answer["replay"]) == ([1, 2], 16, 3)
    # What was drawn in iteration 2 had been fresh in iteration 1.
    assert (answer["different"], len(answer["trajectories"])) == (16, 19)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with the checkpoints of iterations 2 and 3; that of 3 is not whole."""
    iterated(tmp_path / "replay.sqlite", count=3).close()
    for number in (2, 3):
        (tmp_path / "checkpoints" / f"{number:06d}" / "model").mkdir(parents=True)
    (tmp_path / "checkpoints" / "000002" / "COMPLETE").touch()
    return tmp_path


def test_lineage_command_goes_both_ways_and_names_checkpoints(folder: Path) -> None:
    text = ask("lineage", "2", str(folder)).output
    assert f"iteration 2 of run {RUN}: 8 fresh, 3 drawn, 2 optimizer steps" in text
    assert "collected by policy 1, made policy 2" in text
    assert f"in checkpoint {folder}/checkpoints/000002" in text
    rows = [line.split() for line in text.splitlines()[5:16]]
    assert [row[1] for row in rows] == ["fresh"] * 8 + ["replay"] * 3
    ((id,),) = sql(folder / "replay.sqlite", "select trajectory from draws where iteration = 2 and slot = 8")
    uses = ask("lineage", id, str(folder)).output
    assert f"iteration 1 made policy 1, in {folder}/checkpoints/000002" in uses
    answer = json.loads(ask("lineage", id, str(folder), "--json").output)
    held = {use["iteration"]: use["held_by"] for use in answer["uses"]}
    assert {held[1], held[2]} == {f"{folder}/checkpoints/000002"}
    # The checkpoint of iteration 3 is not whole.
    assert json.loads(ask("lineage", "3", str(folder), "--json").output)["checkpoint"] is None
    for inner in ("", "model"):
        text = ask("lineage", str(folder / "checkpoints" / "000002" / inner)).output
        assert text.startswith(f"after iteration 2 of run {RUN} (policy 2): 16 different trajectories, used 16 times f")


def test_lineage_of_a_database_of_several_runs_asks_which(location: Location) -> None:
    store = iterated(location, count=3)
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
