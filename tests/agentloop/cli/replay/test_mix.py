"""What `agentloop replay mix` prints, and what it refuses. That runs then do it is tested on the runs."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from replay import ReplayStore
from replay.next_batch import preview_with
from tests.fakes.records import RUN, iterated
from tests.fakes.replay_command import ask

CONFIG = """
run: {iterations: 6}
environment: {task_pool: 3}
batch: {trajectories: 12, group_size: 4, mini_batch: 12}
replay:
  fraction: 0.5
  successful_only: true
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three iterations of 8 rows, 3 of them successes, and two drawn in each."""
    iterated(tmp_path / "replay.sqlite").close()
    return tmp_path / "replay.sqlite"


def test_mix_of_a_run_is_what_the_question_answers(run: Path) -> None:
    settings = ("fraction=0.0234375", "successful_only=false", "sampler=recency", "sampler_options={half_life: 2}")
    asked = (run, *(word for setting in settings for word in ("--set", f"replay.{setting}")))
    options = {"sampler": "recency", "sampler_options": {"half_life": 2}}
    given = {"fraction": 0.0234375, "successful_only": False, **options}
    result = ask("mix", *asked, "--json")
    with closing(ReplayStore.open(run, read_only=True)) as store:
        assert (result.exit_code, json.loads(result.output)) == (0, preview_with(store, RUN, **given))
    text = ask("mix", *asked).output
    assert "iteration  4, policy 3" in text
    assert "replayed   3 of 3 planned (2.3 % configured)" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["eligible", "24", "0"] in lines
    assert sum(len(line) == 7 and line[3] in ("yes", "no") for line in lines) == 3


def test_mix_knows_how_many_rows_of_a_file_are_tasks(run: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    lines = [json.dumps({"question": f"{number}?", "answer": "1", "split": "train"}) for number in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines, lines[0].replace("train", "test")]))
    asked = ("--set", f"tasks.data={tmp_path}/rows.jsonl", "--set", "environment.task_pool=unlimited")
    held_out = ("--set", "tasks.held_out=test", "--set", "replay.unit=trajectory")
    plan = json.loads(ask("mix", run, "--config", tmp_path / "run.yaml", "--json", *asked, *held_out).output)["plan"]
    # Three groups; one task was tried, so two of the three in the file come first.
    assert (plan["assumed_tasks"], plan["new_tasks"]) == (3, 2)


def test_mix_of_a_run_that_has_ended_says_what_a_resume_would_do(run: Path) -> None:
    assert "has ended" not in ask("mix", run).output
    with closing(ReplayStore.open(run)) as store:
        store.roles.end_run(RUN)
    text = ask("mix", run).output
    assert text.startswith("The run has ended: a resume with more iterations, or without its target, would make this")


def test_mix_runs_the_file_of_a_sampler_of_ones_own(run: Path) -> None:
    answer = json.loads(ask("mix", run, "--set", "replay.sampler=examples/long_first.py:LongFirst", "--json").output)
    assert answer["settings"]["sampler"] == "examples/long_first.py:LongFirst"


@pytest.mark.parametrize(("most", "left"), [(5, 0), (6, 24)])
def test_mix_leaves_out_rows_longer_than_the_settings_allow(run: Path, most: int, left: int) -> None:
    answer = json.loads(ask("mix", run, "--set", f"context.max_tokens={most}", "--json").output)
    assert {"rule": "context.max_tokens", "left": left, "out": 24 - left} in answer["rules"]
