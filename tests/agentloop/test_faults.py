"""What goes wrong around a run: kills, signals, full and read-only disks, bad numbers, bad sinks, bad tools."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentloop.checkpoint import complete_checkpoints, load_checkpoint
from agentloop.cli import main
from agentloop.collect import Actors, Birth, collect
from agentloop.config import RunConfig
from agentloop.environments import load_environment
from agentloop.errors import UserError
from agentloop.metrics import JsonlSink
from agentloop.report import write_report
from agentloop.training import train
from context import default_authors, loss_mask
from context.parse import HermesParser
from replay.records import Trajectory
from replay.store import ReplayStore
from replay.validate import validate
from tests.agentloop.processes import (
    Moments,
    Training,
    assert_same_bits,
    assert_same_run,
    assert_sound,
    logged,
    write_config,
)
from tests.agentloop.runs import ROOT, SilentDisplay, rows, save_qwen2, small_config
from tests.agentloop.scripted import CHATML, CUT, LOG_PROB, ScriptedGenerator, call

HERE = Path(__file__).parent
MOODY = f"{HERE / 'parity_environment.py'}:Moody"
ITERATIONS = 6
EVERY = 2


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("models") / "qwen2")


def config_in(folder: Path, model: Path, **sections: dict[str, Any]) -> RunConfig:
    defaults: dict[str, dict[str, Any]] = {
        "run": {"iterations": ITERATIONS},
        "environment": {"name": MOODY},
        "checkpoint": {"every": EVERY},
    }
    return small_config(folder, model, **{**defaults, **sections})


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> Path:
    return train(config_in(tmp_path_factory.mktemp("unbroken"), qwen2), display=SilentDisplay()).folder


FrontDoor = Callable[..., tuple[int, str]]


@pytest.fixture
def front_door(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> FrontDoor:
    """`agentloop train` on a configuration, in this process: its exit code and what it wrote to stderr."""

    def run(config: RunConfig, *options: str) -> tuple[int, str]:
        file = write_config(config, tmp_path / "config.yaml")
        monkeypatch.setattr(sys, "argv", ["agentloop", "train", str(file), *options])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        lines = [
            line for line in capfd.readouterr().err.splitlines() if line.startswith("agentloop") or "Trace" in line
        ]
        assert len(lines) <= 1
        return int(ended.value.code or 0), "".join(lines)

    return run


# kill -9


def test_killed_run_ends_like_the_unbroken_one(tmp_path: Path, qwen2: Path, unbroken: Path) -> None:
    config = config_in(tmp_path / "runs", qwen2)
    file = write_config(config, tmp_path / "config.yaml")
    moments = Moments(tmp_path / "runs" / "small-001", every=EVERY)
    training = Training(file)
    training.says("evaluate ...")
    training.send(signal.SIGSTOP)
    with pytest.raises(UserError, match="run.folder must be used by one process at a time, got .*small-001"):
        train(config, resume=True, display=SilentDisplay())
    training.kill()
    assert complete_checkpoints(moments.folder / "checkpoints") == []
    for moment in (moments.committed_unpublished, moments.appending):
        training = Training(file, "--resume")
        training.says("iteration")
        assert training.kill_when(moment), training.errors
        assert moments.committed - moments.saved <= EVERY
    orphans = moments.number("select count(*) from trajectories where state = 'orphaned'")
    assert orphans > 0
    assert train(config, resume=True, display=SilentDisplay()).exit_code == 0
    assert_sound(moments.folder, iterations=ITERATIONS)
    assert_same_run(moments.folder, unbroken)
    assert moments.number("select count(*) from trajectories where state = 'orphaned'") >= orphans


def test_start_killed_before_it_had_a_name_does_not_stop_the_next(tmp_path: Path, qwen2: Path) -> None:
    (tmp_path / "small-001").mkdir()
    config = config_in(tmp_path, qwen2, run={"iterations": 1})
    with pytest.raises(UserError, match="--resume must find a run named 'small'"):
        train(config, resume=True, display=SilentDisplay())
    assert train(config, display=SilentDisplay()).folder.name == "small-002"


def test_lock_is_not_held_by_what_a_killed_trainer_has_forked(tmp_path: Path) -> None:
    holder = """
import os, signal, sys, time
from pathlib import Path
from agentloop.config import RunConfig
from agentloop.run_folder import RunFolder
lock = RunFolder(Path(sys.argv[1]), "id", RunConfig()).lock()
child = os.fork()
if child == 0:
    os.close(1)
    time.sleep(30)
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", holder, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False
    )
    child = int(done.stdout)
    try:
        check = "import sys\n" + holder.partition("child =")[0]
        again = subprocess.run([sys.executable, "-c", check, str(tmp_path)], cwd=ROOT, check=False)
        assert (done.returncode, again.returncode) == (-signal.SIGKILL, 0)
    finally:
        os.kill(child, signal.SIGKILL)


# Ctrl-C and SIGTERM


def test_signals_end_a_run_and_resume_continues_it(tmp_path: Path, qwen2: Path, unbroken: Path) -> None:
    config = config_in(tmp_path / "runs", qwen2)
    file = write_config(config, tmp_path / "config.yaml")
    moments = Moments(tmp_path / "runs" / "small-001", every=EVERY)

    def send(training: Training, number: signal.Signals, *, at: float, code: int, within_s: float) -> None:
        training.wait_until(at)
        began = time.monotonic()
        training.send(number)
        assert training.wait() == code, training.errors
        assert training.ended_after(began) < within_s
        assert training.errors == []

    # Before the first checkpoint there is nothing to finish: the first signal ends the run.
    training = Training(file, mood="slow")
    send(training, signal.SIGINT, at=training.says("evaluate ..."), code=130, within_s=5)
    assert any("stopped" in line for line in training.printed)
    assert moments.committed == 0

    # Once: the iteration is finished, committed, and in a checkpoint.
    training = Training(file, "--resume", mood="slow")
    send(training, signal.SIGTERM, at=training.says("iteration 2/6") + 0.5, code=143, within_s=10)
    assert moments.committed == moments.saved == 3
    assert any("held-out success" in line for line in training.printed)

    # Twice: at once, as a crash.
    training = Training(file, "--resume", mood="slow")
    training.wait_until(training.says("iteration 4/6") + 0.5)
    training.send(signal.SIGINT)
    send(training, signal.SIGINT, at=training.says("stopping after this iteration"), code=130, within_s=1)
    assert (moments.committed, moments.saved) == (4, 4)

    assert train(config, resume=True, display=SilentDisplay()).exit_code == 0
    assert_sound(moments.folder, iterations=ITERATIONS)
    assert_same_run(moments.folder, unbroken)


def test_first_ctrl_c_ends_the_warm_up(tmp_path: Path) -> None:
    training = Training(ROOT / "configs" / "quickstart.yaml", "--set", f"run.folder={tmp_path}")
    began = training.says("warm-up ...")
    training.send(signal.SIGINT)
    assert training.wait() == 130
    assert training.ended_after(began) < 5
    assert (training.errors, training.printed[-1].startswith("stopped: ")) == ([], True)
    assert list((tmp_path / "quickstart-001").glob("model*")) == []


# disks


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Callable[..., None]]:
    """A file system of its own on `folder`; what it yields changes its mount options."""
    folder.mkdir()

    def mount(options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    if not mount(f"size={kilobytes}k"):
        pytest.skip("needs the right to mount a small file system")

    def change(options: str) -> None:
        assert mount(f"remount,{options}")

    try:
        yield change
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def kilobytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*")) // 1024


def check_full_disk(front_door: FrontDoor, disk: Path, kilobytes: int, model: Path, unbroken: Path) -> str:
    """One clear line, nothing lost, and with room again the run ends as if nothing had happened."""
    with small_disk(disk, kilobytes) as change:
        config = config_in(disk / "runs", model)
        run = disk / "runs" / "small-001"
        code, line = front_door(config)
        assert code == 2
        assert f" at {run}" in line and "bytes free)" in line
        for checkpoint in complete_checkpoints(run / "checkpoints"):
            load_checkpoint(checkpoint)
        change("size=1g")
        assert front_door(config, *(["--resume"] if (run / "run.json").exists() else [])) == (0, "")
        run = max((disk / "runs").glob("small-*"))
        assert_sound(run, iterations=ITERATIONS)
        assert_same_run(run, unbroken)
    return line


def test_full_disk_is_one_line_and_loses_nothing(
    front_door: FrontDoor, tmp_path: Path, qwen2: Path, unbroken: Path
) -> None:
    share = kilobytes_of(unbroken) // 10
    lines = [check_full_disk(front_door, tmp_path / f"{n}", n * share, qwen2, unbroken) for n in (3, 6)]
    assert all(line.startswith("agentloop: ") for line in lines)


@pytest.mark.soak
def test_disk_may_be_full_at_any_point(front_door: FrontDoor, tmp_path: Path, qwen2: Path, unbroken: Path) -> None:
    whole = kilobytes_of(unbroken)
    sizes = range(4, whole * 9 // 10, whole // 40)
    lines = [check_full_disk(front_door, tmp_path / f"{size}", size, qwen2, unbroken) for size in sizes]
    for place in ("/model", "/policies/", "/checkpoints/", "/replay.sqlite"):
        assert any(place in line for line in lines), place


def test_read_only_run_folder_is_one_line(front_door: FrontDoor, tmp_path: Path, qwen2: Path, unbroken: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, 100_000) as change:
        stopped = train(config_in(disk / "runs", qwen2), display=_StopAfter(3))
        assert (stopped.exit_code, stopped.iterations) == (143, 3)
        change("ro")
        config = config_in(disk / "runs", qwen2)
        for options in ([], ["--resume"]):
            code, line = front_door(config, *options)
            assert code == 2
            assert f"run.folder must be writable, got Read-only file system at {disk}" in line
        change("rw")
        assert front_door(config, "--resume") == (0, "")
        assert_same_run(stopped.folder, unbroken)


def test_run_folder_that_is_a_file_is_one_line(front_door: FrontDoor, tmp_path: Path, qwen2: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        code, line = front_door(config_in(folder, qwen2))
        assert code == 2
        assert f"run.folder must be writable, got {'File exists' if folder.name == 'file' else 'Not a dir'}" in line
    assert (tmp_path / "file").read_text() == "mine"


class _StopAfter(SilentDisplay):
    """Sends SIGTERM to its own process after some iterations, as a scheduler would."""

    def __init__(self, iterations: int) -> None:
        super().__init__()
        self._last = iterations

    def iteration(self, number: int, total: int, metrics: Any) -> None:
        super().iteration(number, total, metrics)
        if number == self._last:
            os.kill(os.getpid(), signal.SIGTERM)


# numbers


def test_nan_gradient_stops_the_run_with_one_line(front_door: FrontDoor, tmp_path: Path, qwen2: Path) -> None:
    code, line = front_door(config_in(tmp_path / "runs", qwen2, optimizer={"learning_rate": 1e30}))
    assert code == 1
    assert line.startswith("agentloop: training stopped: loss and gradient must be finite, got loss nan")
    run = tmp_path / "runs" / "small-001"
    # The first of its two steps was applied in memory; nothing of the iteration is in a checkpoint.
    assert [path.name for path in complete_checkpoints(run / "checkpoints")] == ["000000"]
    assert not [name for name in load_checkpoint(run / "checkpoints" / "000000").tensors if "exp_avg" in name]
    assert rows(run / "replay.sqlite", "select iteration, value from metrics where name = 'run/stopped'") == [(1, 1.0)]
    assert (run / "report.html").exists()


def test_skipped_gradients_leave_weights_and_optimizer_as_they_were(tmp_path: Path, qwen2: Path) -> None:
    """Advantages of 1e30 have gradients whose norm float32 can't hold."""
    display = SilentDisplay()
    config = config_in(
        tmp_path,
        qwen2,
        environment={"name": f"{HERE / 'parity_environment.py'}:Enormous"},
        advantage={"normalise_std": False},
        optimizer={"on_bad_gradient": "skip"},
    )
    result = train(config, display=display)
    assert result.iterations == ITERATIONS
    assert [row["actor/skipped_bad_gradient"] for row in display.iterations] == [2.0] * ITERATIONS
    checkpoint = load_checkpoint(complete_checkpoints(result.folder / "checkpoints")[-1])
    assert not [name for name in checkpoint.tensors if "exp_avg" in name]
    first, last = (result.folder / "policies" / name / "model.safetensors" for name in ("000000", "000006"))
    assert_same_bits(first, last)
    assert result.report.stat().st_size > 0


def test_weights_that_are_no_numbers_are_refused_by_name(front_door: FrontDoor, tmp_path: Path, qwen2: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(qwen2)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    bad = save_qwen2(tmp_path / "bad")
    model.save_pretrained(bad)
    code, line = front_door(config_in(tmp_path / "runs", bad))
    assert (code, line) == (
        1,
        "agentloop: training stopped: log-probs of the policy must be numbers, got NaN from policy version 0. "
        "Its weights are NaN or too large: lower optimizer.learning_rate, or check model.path.",
    )


def test_numbers_that_are_none_reach_every_place_as_unknown(tmp_path: Path, qwen2: Path) -> None:
    result = train(config_in(tmp_path, qwen2, run={"iterations": 1}), display=SilentDisplay())
    store = ReplayStore.open(result.folder / "replay.sqlite")
    store.add_metrics(store.run().id, 1, {"actor/entropy": float("nan"), "actor/grad_norm": float("inf")})
    found = rows(
        store.path, "select value from metrics where name in ('actor/entropy', 'actor/grad_norm') order by name"
    )
    assert found == [(None,), (math.inf,)]
    assert "NaN" not in write_report(store, result.folder).read_text()
    store.close()
    sink = JsonlSink(result.folder / "metrics.jsonl")
    sink.log(2, {"actor/entropy": float("nan")})
    sink.close()
    assert logged(result.folder)[-1] == {"iteration": 2, "actor/entropy": None}


def test_nan_reward_stops_the_run_and_resume_continues_once_it_is_mended(
    front_door: FrontDoor, tmp_path: Path, qwen2: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(tmp_path / "runs", qwen2)
    monkeypatch.setenv("AGENTLOOP_TEST_MOOD", "nan")
    code, line = front_door(config)
    assert (code, line) == (
        2,
        "agentloop: Moody.reward must return a finite number, got nan. Mend it and --resume; nothing was lost.",
    )
    run = tmp_path / "runs" / "small-001"
    ((learned, stored),) = rows(
        run / "replay.sqlite", "select sum(fresh), (select count(*) from trajectories) from iterations"
    )
    assert learned == stored > 0
    monkeypatch.delenv("AGENTLOOP_TEST_MOOD")
    assert front_door(config, "--resume") == (0, "")
    assert_same_run(run, unbroken)


# sinks

SINKS = """
import time


class Raises:
    def __init__(self, folder):
        self.folder = folder

    def log(self, iteration, metrics):
        raise RuntimeError("no network")

    def close(self):
        raise RuntimeError("closed twice")


class Hangs(Raises):
    def log(self, iteration, metrics):
        if iteration == 2:
            time.sleep(3600)

    def close(self):
        time.sleep(3600)
"""


def test_sinks_that_raise_or_hang_change_nothing_and_are_told_once(tmp_path: Path, qwen2: Path, unbroken: Path) -> None:
    own = tmp_path / "sinks.py"
    own.write_text(SINKS)
    display = SilentDisplay()
    sinks = (f"{own}:Raises", "jsonl", f"{own}:Hangs")
    result = train(config_in(tmp_path / "runs", qwen2, metrics={"sinks": sinks}), display=display)
    assert result.exit_code == 0
    assert_same_run(result.folder, unbroken)
    told = sorted(note for note in display.notes if note.startswith("metrics sink"))
    assert len(told) == 2
    assert told[0].startswith(f"metrics sink {own}:Hangs does not keep up")
    assert told[1].startswith(f"metrics sink {own}:Raises failed: RuntimeError: no network")


# tools, calls and replies, with a policy that says what is written here

LIMITS = {"max_turns": 3, "max_tokens_per_turn": 200, "tool_timeout_s": 0.3, "tool_output_chars": 60}


def episode(*replies: str, max_tokens: int = 1500) -> tuple[Trajectory, list[str]]:
    """One episode with Faulty's tools, as the loop collects, stores and reads it; and the prompts it was shown."""
    factory = load_environment(f"{HERE / 'faulty_tools.py'}:Graded", {})
    config = RunConfig.model_validate({"rollout": LIMITS, "context": {"max_tokens": max_tokens}})
    generator = ScriptedGenerator([replies])
    actors = Actors(factory, generator, CHATML.renderer(), HermesParser(), default_authors())
    task = factory.make_task(random.Random(0))
    (trajectory,) = collect(actors, [(task, 1)], Birth("run", 1, 0), config).trajectories
    validate(trajectory, default_authors())
    return trajectory, generator.prompts[0]


@pytest.mark.parametrize(
    ("reply", "kind", "shown"),
    [
        (call("fail", '{"kind": "value"}'), "raised", "ValueError: bad value"),
        (call("fail", '{"kind": "exit"}'), "raised", "SystemExit: 3"),
        (call("hang", '{"kind": "sleep, catching"}'), "timeout", "hang took longer than 0.3 s"),
        (call("flood"), None, "xxxxxxxx... [cut: 104857540 characters left out]"),
        (call("give", '{"kind": "surrogate"}'), "not_text", "a\ufffdb"),
        (call("gve"), "unknown_tool", "Did you mean give?"),
        (call("add", '{"a": "x"}'), "bad_arguments", "argument 'a'"),
        (call("add", '{"a": 1,}'), "malformed", "malformed tool call: a tool call is not valid JSON"),
        (call("add", '{"a": 1e999}'), "malformed", "malformed tool call: a tool call holds a number that is too large"),
        ('<tool_call>\n{"name": "add"', "malformed", "malformed tool call"),
    ],
)
def test_bad_tools_and_calls_are_answered_and_the_episode_goes_on(reply: str, kind: str | None, shown: str) -> None:
    trajectory, prompts = episode(reply, "done")
    assert shown in prompts[1]
    record = trajectory.record
    assert (record.stop_reason, record.error_kind, record.num_turns, record.reward) == ("answered", kind, 2, 1.0)
    assert [m.role for m in trajectory.messages][-3:] == ["assistant", "tool", "assistant"]
    assert trajectory.messages[-3].content + "".join(c.name for c in trajectory.messages[-3].tool_calls) != ""
    # Trained is what was sampled, to the token: the two replies with their end tokens, and nothing of the answer.
    (segment,) = trajectory.segments
    mask = loss_mask(segment.tokens, default_authors())
    said = CHATML.codec.decode(segment.tokens.token_ids[mask].tolist())
    assert said == f"{reply}<|im_end|>done<|im_end|>"
    assert record.num_action_tokens == int(mask.sum())
    assert set(segment.tokens.behavior_log_probs[mask].tolist()) == {LOG_PROB}


@pytest.mark.parametrize(
    ("replies", "reason", "turns"),
    [
        (["done"], "answered", 1),
        ([call("count")] * 3, "max_turns", 3),
        ([call("add", "{")] * 3, "max_turns", 3),
        (["I was about to" + CUT], "truncated", 1),
        ([call("count"), '<tool_call>\n{"name": ' + CUT], "truncated", 2),
    ],
)
def test_episodes_end_under_a_name_and_only_answers_are_rewarded(replies: list[str], reason: str, turns: int) -> None:
    trajectory, _ = episode(*replies)
    record = trajectory.record
    assert (record.stop_reason, record.num_turns) == (reason, turns)
    assert (record.reward, record.success) == ((1.0, True) if reason == "answered" else (0.0, False))
    mask = loss_mask(trajectory.segments[0].tokens, default_authors())
    ends = int((trajectory.segments[0].tokens.token_ids[mask] == CHATML.end_id).sum())
    assert ends == turns - (reason == "truncated")  # an end that was not sampled is not trained


def test_episode_ends_when_a_tool_result_leaves_no_room() -> None:
    first, _ = episode(call("count"), "done")
    prompt = first.record.num_tokens - first.record.num_action_tokens
    trajectory, prompts = episode(call("flood"), "never said", max_tokens=prompt + 20)
    assert (trajectory.record.stop_reason, trajectory.record.reward, len(prompts)) == ("context_full", 0.0, 1)
    assert trajectory.record.num_tokens <= prompt + 20
