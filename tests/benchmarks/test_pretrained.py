"""When a run of the pretrained model has reached its level, and what it is made with."""

import json
import random
from itertools import product
from pathlib import Path

import pytest

from agentloop.config.config_file import load_config
from benchmarks._families import FAMILIES
from benchmarks._lookup_rows import LookupRows, demonstrated, tasks
from benchmarks._replay_figures import percent_more, to_target
from benchmarks.pretrained import ARMS, COLUMNS, SHOWN, is_done, newest_success, reached, settings


def test_level_is_that_of_the_last_256_fresh_episodes_and_runs_have_as_many() -> None:
    rows = [(number, 64, success) for number, success in enumerate([0.0, 0.5, 0.5, 0.5, 0.8, 0.6, 0.2, 0.0], 1)]
    assert newest_success(rows[:3]) == 0.0  # 192 are too few to say
    assert newest_success(rows[:4]) == pytest.approx(1.5 / 4)
    assert reached(rows[:4]) is None and reached(rows) == 5  # 0.5, 0.5, 0.5, 0.8
    assert not is_done([*rows, *rows[:3]], "on_policy") and is_done([*rows, *rows[:4]], "on_policy")
    assert not is_done(rows[:7], "tune_1_1e-05") and is_done(rows, "tune_1_1e-05")


def test_first_success_is_that_of_the_first_512_fresh_episodes() -> None:
    first, later = [[32, 8, 0.5, 1000, 4, 30.0, 40.0]] * 16, [[32, 8, 1.0, 1000, 4, 30.0, 40.0]] * 3
    success_of = SHOWN.successes["success of the first 512"]
    assert success_of({"columns": COLUMNS, "iterations": [*first, *later]}) == 0.5


def test_costs_are_counted_to_the_iteration_that_reached_the_level() -> None:
    iterations = [[32, 16, 0.5, 1000, 4, 30.0, 40.0]] * 5
    mine, other = ({"columns": COLUMNS, "iterations": iterations, "reached": reached} for reached in (2, 4))
    assert to_target(mine, "fresh") == 64 and to_target(other, "tokens") == 4000
    assert percent_more(mine, other, "cpu") == -50.0
    assert percent_more(mine, {**other, "reached": None}, "steps") == pytest.approx(-60.0)  # 8 of all 20


@pytest.mark.parametrize(("family", "arm"), [*product(FAMILIES, ARMS)])
def test_every_arm_is_a_configuration_with_as_many_steps_for_as_many_fresh_episodes(family: str, arm: str) -> None:
    tuned = FAMILIES[family]._replace(found=(2, 2e-5))
    given = [f"{key}={json.dumps(value)}" for key, value in settings(tuned, arm, 0, Path("data")).items()]
    config = load_config(Path("examples/calculator_agent/train.yaml"), given)
    fresh = round(config.batch.trajectories * (1 - config.replay.fraction))
    assert fresh == (24 if arm == "replay_instead" else 32)
    assert config.batch.trajectories / config.batch.mini_batch == 4
    assert config.run.iterations * fresh == 768


def test_arms_of_a_family_whose_control_is_not_tuned_are_refused() -> None:
    untuned = FAMILIES["calculator"]._replace(found=None)
    with pytest.raises(SystemExit, match="must be tuned"):
        settings(untuned, "replay_on_top", 0, Path("data"))
    assert settings(untuned, "tune_1_1e-05", 0, Path("data"))["batch.ppo_epochs"] == 1


def test_look_ups_are_rows_whose_demonstrations_end_at_a_code() -> None:
    (task,) = tasks((5, 6), 1, random.Random(0))
    again = LookupRows().task_from_row(json.loads(json.dumps(task.payload)))
    assert again.messages() == task.messages() and again.payload["hops"] in (5, 6)
    *_, last_result, answer = demonstrated(task, random.Random(1))["messages"]
    assert answer["content"] == f'The code is "{json.loads(last_result["content"])["code"]}".'
