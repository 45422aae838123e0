"""When a run of the pretrained model has reached its level, and what it is made with."""

import json
import sqlite3
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest

from agentloop.config.config_file import load_config
from benchmarks._families import FAMILIES
from benchmarks._pretrained_tables import COLUMNS, shown
from benchmarks._replay_figures import percent_more, to_target
from benchmarks.pretrained import ARMS, Iteration, facts, is_done, newest_success, reached, settings

CALCULATOR, GAMES = FAMILIES["calculator"], FAMILIES["textworld"]


def iterations(*successes: float, fresh: int = 64) -> list[Iteration]:
    return [Iteration(fresh, 0.0, success, 1000, 4, 40.0, fresh, 20.0, 20.0, 16) for success in successes]


def test_facts_of_a_run_are_of_its_own_rows_in_iterations_that_have_ended(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "replay.sqlite")) as database, database:
        columns = "run, iteration, source, state, reward, advantage, num_action_tokens, num_turns"
        database.execute(f"create table trajectories ({columns})")
        database.execute("create table iterations (run, iteration, optimizer_steps)")
        database.execute("create table metrics (run, iteration, name, value)")
        own, fails = ("r", 1, "self", "eligible", 1, 0.5, 10, 3), ("r", 1, "self", "eligible", 0, 0.0, 20, 5)
        others = [("r", 1, "earlier", "eligible", 1, 1.0, 99, 9), ("r", 1, "self", "orphaned", 1, 1.0, 99, 9)]
        rows = [own, fails, *others, ("r", 2, "self", "eligible", 1, 1.0, 99, 9)]  # the second has no time yet
        database.executemany("insert into trajectories values (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        database.execute("insert into iterations values ('r', 1, 4)")
        named = {"batch/replay": 8.0, "time/collect": 2.04, "time/update": 3.0, "time/iteration": 6.0}
        database.executemany("insert into metrics values ('r', 1, ?, ?)", list(named.items()))
    assert facts(tmp_path) == [Iteration(2, 8.0, 0.5, 30, 4, 6.0, 8, 2.0, 3.0, 1)]


def test_level_is_that_of_the_last_256_fresh_episodes() -> None:
    made = iterations(0.0, 0.5, 0.5, 0.5, 0.8, 0.6, 0.2, 0.0)
    assert newest_success(made[:3]) == 0.0  # 192 are too few to say
    assert newest_success(made[:4]) == pytest.approx(1.5 / 4)
    assert reached(made[:4], 0.5) is None and reached(made, 0.5) == 5  # 0.5, 0.5, 0.5, 0.8
    assert reached(made, 0.6) == 6 and reached(made, 0.7) is None


def test_a_run_ends_at_its_level_or_where_all_of_its_family_end() -> None:
    low, high = iterations(*[0.0] * 12), iterations(*[0.9] * 12)
    assert not is_done(high[:11], CALCULATOR, "on_policy") and is_done(high, CALCULATOR, "on_policy")
    assert not is_done(high[:3], GAMES, "on_policy") and is_done(high[:4], GAMES, "on_policy")
    assert not is_done(low[:11], GAMES, "on_policy") and is_done(low, GAMES, "on_policy")
    assert not is_done(high[:7], CALCULATOR, "tune_1_1e-05") and is_done(low[:8], CALCULATOR, "tune_1_1e-05")


def test_first_success_is_that_of_the_first_episodes_of_the_family() -> None:
    first, later = [[32, 8, 0.5, 1000, 4, 30.0, 40.0]] * 16, [[32, 8, 1.0, 1000, 4, 30.0, 40.0]] * 3
    success_of = shown(CALCULATOR).successes["success of the first 512"]
    assert success_of({"columns": COLUMNS, "iterations": [*first, *later]}) == 0.5


def test_costs_are_counted_to_the_iteration_that_reached_the_level() -> None:
    iterations = [[32, 16, 0.5, 1000, 4, 30.0, 40.0]] * 5
    mine, other = ({"columns": COLUMNS, "iterations": iterations, "reached": reached} for reached in (2, 4))
    assert to_target(mine, "fresh") == 64 and to_target(other, "tokens") == 4000
    assert percent_more(mine, other, "cpu") == -50.0
    assert percent_more(mine, {**other, "reached": None}, "steps") == pytest.approx(-60.0)  # 8 of all 20


@pytest.mark.parametrize(("family", "arm"), [*product(FAMILIES, ARMS)])
def test_every_arm_is_a_configuration_with_as_many_steps_for_as_many_fresh_episodes(family: str, arm: str) -> None:
    given = [f"{key}={json.dumps(value)}" for key, value in settings(FAMILIES[family], arm, 0, Path("data")).items()]
    config = load_config(Path(FAMILIES[family].train), given)
    fresh = round(config.batch.trajectories * (1 - config.replay.fraction))
    assert fresh == (32 if config.replay.fraction in (0.0, 1 / 3) else 24)
    assert config.batch.trajectories / config.batch.mini_batch == 4
    assert config.run.iterations * fresh == 768
