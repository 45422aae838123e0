"""Processes that code of the user's begins never end the run, and Ctrl-C ends it as it ends any."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentloop.config import RunConfig
from tests.fakes.engine_server import serving
from tests.fakes.environments import child_processes
from tests.fakes.processes import write_config
from tests.fakes.runs import ROOT, small_config
from tests.fakes.worker_runs import issued_run, worker_config

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]
FILE = Path(child_processes.__file__)
ENDLESS = 2000
BESIDE = """
import json, sys, threading
import agentloop

codes = []
thread = threading.Thread(target=lambda: codes.append(agentloop.train(**json.loads(sys.argv[1])).exit_code))
thread.start()
thread.join()
sys.exit(codes[0])
"""
COMMANDS = ("train", "sft", "worker", "train in a thread")
Command = Callable[[bool], list[str]]
"""What is to be run; True: it is to go on until Ctrl-C comes."""


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
    said = [
        {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n}"}]}
        for n in range(20)
    ]
    (folder / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in said))

    def config(name: str, endless: bool, **sections: Any) -> RunConfig:
        run = {"name": name, "folder": str(folder), "iterations": ENDLESS if endless else 1}
        return small_config(folder, qwen2, run=run, **sections)

    def of_train(endless: bool) -> list[str]:
        return ["-m", "agentloop", "train", str(write_config(config("trained", endless, **rows), folder / "t.yaml"))]

    def of_sft(endless: bool) -> list[str]:
        section = {"data": str(folder / "said.jsonl"), "epochs": ENDLESS if endless else 1, "batch": 2}
        found = config("learned", endless, sft=section, metrics={"sinks": [f"{FILE}:Sink"]})
        return ["-m", "agentloop", "sft", str(write_config(found, folder / "s.yaml"))]

    def in_a_thread(endless: bool) -> list[str]:
        run = {"name": "python", "folder": str(folder), "iterations": 1}
        small = {"context": {"max_tokens": 400}, "rollout": {"max_turns": 1, "max_tokens_per_turn": 8}}
        parts = {name: rows[name] for name in ("batch", "evaluation")}
        given = {"model": str(qwen2), "reward": f"{FILE}:judge", "tasks": str(data), "run": run, **small, **parts}
        return ["-c", BESIDE, json.dumps(given)]

    os.environ["AGENTLOOP_TEST_MARK"] = str(folder / "mark")
    with serving(qwen2) as server:
        own = worker_config(folder / "issued", qwen2, server, folder / "issued.sqlite", **rows)
        with issued_run(own) as issued:

            def of_worker(endless: bool) -> list[str]:
                issued.issue(40)
                return ["-m", "agentloop", "worker", "--run", str(issued.folder), "--concurrency", "4"]

            yield {"train": of_train, "sft": of_sft, "worker": of_worker, "train in a thread": in_a_thread}


def begun(arguments: list[str], ways: str, mark: Path) -> subprocess.Popen[str]:
    place = {"OMP_NUM_THREADS": "1", "AGENTLOOP_TEST_WAYS": ways, "AGENTLOOP_TEST_MARK": str(mark)}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **place},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def until_asked(process: subprocess.Popen[str], mark: Path) -> None:
    deadline = time.monotonic() + 100
    while not mark.exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def until_gone(group: int) -> None:
    """Of those it began, some end when they see that it has."""
    deadline = time.monotonic() + 30
    while subprocess.run(["pgrep", "-g", str(group)], stdout=subprocess.DEVNULL, check=False).returncode == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("command", COMMANDS)
def test_run_goes_on_whatever_processes_its_code_begins(
    command: str, commands: dict[str, Command], tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    with begun(commands[command](False), ",".join(child_processes.WAYS), mark) as process:
        if command == "worker":  # which goes on until the learner ends
            until_asked(process, mark)
            process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=200)
    assert process.returncode == (143 if command == "worker" else 0), said
    assert mark.exists()
    assert "metrics sink" not in said
    assert command != "worker" or ", 0 failed" in said
    until_gone(process.pid)


@pytest.mark.parametrize("command", COMMANDS[:3])
@pytest.mark.parametrize("way", ["kept fork executor", "kept spawn executor", "kept forkserver", "subprocess"])
def test_ctrl_c_to_the_group_ends_the_run_and_all_it_began(
    way: str, command: str, commands: dict[str, Command], tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    with begun(commands[command](True), way, mark) as process:
        until_asked(process, mark)
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=200)
    assert process.returncode == 130, said
    assert "must return a finite number" not in said
    assert command != "worker" or ", 0 failed" in said
    until_gone(process.pid)
