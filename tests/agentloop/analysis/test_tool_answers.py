"""`agentloop replay verify --tools`: a tool that is not what it declares is found."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentloop.analysis.tool_answers import ToolCheck, check_tools
from agentloop.cli.main import app
from agentloop.environments import RunEnvironments, load_environment
from agentloop.rollouts.actors import Actors, tool_memory
from agentloop.training.train import train
from context import HermesParser, default_authors
from replay.records import ObservationRecord
from replay.store import ReplayStore
from tests.agentloop.rollouts.collecting import collect
from tests.agentloop.rollouts.test_replayed_observations import FILE, Scripts, add, settings, square
from tests.fakes.records import add_run
from tests.fakes.runs import SilentDisplay, rows, save_qwen2, small_config
from tests.fakes.scripted import CHATML, ScriptedGenerator, call

RUN = "run-1"


def checked(environment: str, scripts: Scripts, folder: Path) -> ToolCheck:
    """Episodes are collected and stored with what their tools answered; then the calls are made again."""
    config, factory = settings(), load_environment(f"{FILE}:{environment}", {})
    size, memory = CHATML.codec.vocab_size, tool_memory(config, RunEnvironments.of_one(factory))
    assert memory is not None
    generator = ScriptedGenerator(scripts)
    actors = Actors(
        RunEnvironments.of_one(factory),
        generator,
        CHATML.renderer(),
        HermesParser(),
        default_authors(),
        size,
        memory=memory,
    )
    found = collect(actors, [(factory.make_task(random.Random(0)), len(scripts))], config, run=RUN)
    with closing(add_run(ReplayStore.create(folder / "replay.sqlite"), RUN)) as store:
        store.append(found.tasks, found.groups, found.trajectories)
        store.remember(memory.take_new())
        return check_tools(store, RunEnvironments.of_one(factory), config, calls=100)


@pytest.mark.parametrize(
    ("environment", "scripts", "calls"),
    [
        ("Pure", [[square(3), square(4), "done"], [square(3), "done"]], 2),
        # add 1, add 2 and add 5 after one another; add 1 and add 3.
        ("Sums", [[add(1), add(2), add(5), "done"], [add(1), add(3), "done"]], 5),
    ],
)
def test_what_is_deterministic_answers_as_it_did(
    environment: str, scripts: Scripts, calls: int, tmp_path: Path
) -> None:
    assert checked(environment, scripts, tmp_path) == ToolCheck(calls=calls, differing=[])


def test_what_lies_about_it_is_named(tmp_path: Path) -> None:
    found = checked("Lying", [[call("count"), "done"]], tmp_path)
    assert found.calls == 1
    (line,) = found.differing
    assert "count() answered '0', and now '1'" in line


def test_the_command_fails_where_a_call_is_answered_otherwise(tmp_path: Path) -> None:
    config = small_config(tmp_path, save_qwen2(tmp_path / "model"), environment={"name": "lookup_chain"})
    run = train(config, display=SilentDisplay()).folder
    asked = CliRunner().invoke(app, ["replay", "verify", str(run), "--tools"])
    assert (asked.exit_code, "no call is remembered" in asked.stdout) == (0, True)
    task = rows(run / "replay.sqlite", "select hash from tasks")[0][0]
    environment = load_environment("lookup_chain", {}).tools_hash(config.rollout.tool_output_chars)
    with closing(ReplayStore.open(run / "replay.sqlite")) as store:
        lie = ObservationRecord("id", task, environment, None, "lookup", {"key": "?"}, "never said")
        after_a_damaged_one = replace(lie, id="later", parent="damaged")
        store.remember([lie, after_a_damaged_one])
    asked = CliRunner().invoke(app, ["replay", "verify", str(run), "--tools"])
    assert asked.exit_code == 1
    assert "1 remembered calls made again, 1 answered otherwise" in asked.stdout
    assert "lookup(key='?') answered 'never said', and now '{\"error\": \"unknown key\"}'" in asked.stdout
