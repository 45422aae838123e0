"""Processes that code of the user's begins never end the run, and Ctrl-C ends it as it ends any."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine_server import serving
from tests.fakes.environments import child_processes
from tests.fakes.processes import Program, until, write_config
from tests.fakes.runs import small_config
from tests.fakes.worker_runs import issued_run, worker_config

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]
FILE = Path(child_processes.__file__)
ENDLESS = 2000
Command = Callable[[bool], list[str]]
"""The words of a command; True: it is to go on until Ctrl-C comes."""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> Iterator[dict[str, Command]]:
    folder = tmp_path_factory.mktemp("runs")
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Say {number}."}) + "\n" for number in range(40)))
    rows = {
        "environment": {"name": "rows"},
        "reward": {"functions": [{"function": f"{FILE}:judge"}]},
        "tasks": {"data": str(data)},
        "batch": {"trajectories": 8, "group_size": 4, "mini_batch": 8},
        "evaluation": {"tasks": 1, "every": 0},
    }
    said = folder / "said.jsonl"
    turns = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}"}] for n in range(20)]
    said.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))

    def written(name: str, endless: bool, **sections: Any) -> str:
        run = {"name": name, "iterations": ENDLESS if endless else 1}
        return str(write_config(small_config(folder, qwen2, run=run, **sections), folder / f"{name}.yaml"))

    def of_sft(endless: bool) -> list[str]:
        section = {"data": str(said), "epochs": ENDLESS if endless else 1, "batch": 2}
        return ["sft", written("learned", endless, sft=section, metrics={"sinks": [f"{FILE}:Sink"]})]

    def of_worker(endless: bool) -> list[str]:
        issued.issue(40)
        return ["worker", "--run", str(issued.folder), "--concurrency", "4"]

    os.environ["AGENTLOOP_TEST_MARK"] = str(folder / "mark")
    with serving(qwen2) as server:
        own = worker_config(folder / "issued", qwen2, server, folder / "issued.sqlite", **rows)
        with issued_run(own) as issued:
            yield {
                "train": lambda endless: ["train", written("trained", endless, **rows)],
                "sft": of_sft,
                "worker": of_worker,
            }


def begun(words: list[str], ways: str, mark: Path) -> Program:
    return Program(*words, place={"AGENTLOOP_TEST_WAYS": ways, "AGENTLOOP_TEST_MARK": str(mark)})


def is_gone(group: int) -> bool:
    return subprocess.run(["pgrep", "-g", str(group)], stdout=subprocess.DEVNULL, check=False).returncode != 0


@pytest.mark.parametrize("command", ["train", "sft", "worker"])
def test_run_goes_on_whatever_processes_its_code_begins(
    command: str, commands: dict[str, Command], tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    with begun(commands[command](False), ",".join(child_processes.WAYS), mark) as process:
        if command == "worker":  # which goes on until the learner ends
            until(lambda: mark.exists() or process.ended)
            process.send(signal.SIGTERM)
        assert process.wait() == (143 if command == "worker" else 0), process.output
        assert mark.exists()
        assert "metrics sink" not in process.output
        assert command != "worker" or ", 0 failed" in process.output
        until(lambda: is_gone(process.id))  # some of them end when they see that it has


@pytest.mark.parametrize("command", ["train", "sft", "worker"])
@pytest.mark.parametrize("way", ["kept fork executor", "kept spawn executor", "kept forkserver", "subprocess"])
def test_ctrl_c_to_the_group_ends_the_run_and_all_it_began(
    way: str, command: str, commands: dict[str, Command], tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    with begun(commands[command](True), way, mark) as process:
        until(lambda: mark.exists() or process.ended)
        os.killpg(process.id, signal.SIGINT)
        assert process.wait() == 130, process.output
        assert "must return a finite number" not in process.output
        assert command != "worker" or ", 0 failed" in process.output
        until(lambda: is_gone(process.id))
