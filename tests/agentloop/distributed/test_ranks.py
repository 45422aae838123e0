"""The same learning on one rank and on two."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from typer.testing import CliRunner

from agentloop.cli.main import app
from agentloop.distributed import tensor_files
from agentloop.distributed.ranks import Ranks, process_group
from agentloop.distributed.tensor_files import read_tensors, write_tensors
from agentloop.errors import UserError
from agentloop.learning.ranked_trainer import check_ranks
from agentloop.runs.checkpoint import write_directory
from tests.agentloop.distributed import ranked_updates
from tests.agentloop.distributed.ranked_updates import DTYPES, FRUGAL, UPDATES, first_half, go_on, updated, whole
from tests.fakes.ranks import places, start_ranks
from tests.fakes.runs import ROOT, small_config

WITHIN = {"float64": 1e-10, "float32": 1e-5}
LOSSES = ("actor/fresh/pg_loss", "actor/replay/pg_loss", "actor/kl_loss")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What one rank and two ranks said of the same updates, each also from the other's checkpoint half way."""
    folder = tmp_path_factory.mktemp("ranks")
    found: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        for ranks in ("one", "two"):
            (folder / name / ranks).mkdir(parents=True)
        trainer, actor, told = first_half(folder / name / "one", dtype)
        told += updated(trainer, UPDATES // 2 + 1, UPDATES)
        found[name] = {"one": told, "weights": {"one": whole(actor)}}
    command = [sys.executable, ranked_updates.__file__, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for name, dtype in DTYPES.items():
        told = json.loads((folder / name / "two.json").read_text())
        found[name] |= {"two": told["unbroken"], "two from one": told["resumed"]}
        found[name]["one from two"] = go_on(folder / name / "two", dtype) if name == "float64" else []
        found[name]["weights"]["two"] = load_file(folder / name / "two.safetensors")
        found[name]["state"] = folder / name / "two" / "state"
    found["frugal"] = json.loads((folder / "frugal.json").read_text())
    yield found


def assert_close(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], within: float) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            assert value == pytest.approx(other[name], rel=within, abs=within), name


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_on_two_ranks_are_those_on_one(runs: dict[str, Any], dtype: str) -> None:
    all_of = runs[dtype]
    assert len(all_of["one"]) == UPDATES
    for ours, theirs in zip(all_of["two"], all_of["one"], strict=True):
        for key in LOSSES:
            assert abs(ours[key] - theirs[key]) <= WITHIN[dtype], key
    # float32 rounds otherwise in another order of sums, and AdamW updates carry it on.
    assert_close(all_of["two"], all_of["one"], 1e-9 if dtype == "float64" else 1e-2)
    for key, own in all_of["weights"]["two"].items():
        torch.testing.assert_close(
            own, all_of["weights"]["one"][key], atol=1e-9 if dtype == "float64" else 1e-3, rtol=0
        )


@pytest.mark.slow
def test_checkpoints_go_from_one_rank_to_two_and_back(runs: dict[str, Any], tmp_path: Path) -> None:
    found = runs["float64"]
    half = UPDATES // 2
    assert_close(found["two from one"], found["one"][half:], 1e-9)
    assert_close(found["one from two"], found["one"][half:], 1e-9)
    # Packed rows, chunks and activations made again change nothing.
    assert_close(runs["frugal"], found["one"][:FRUGAL], 1e-9)
    # Each rank wrote its own part, and none can be left out.
    state = Path(shutil.copytree(found["state"], tmp_path / "state"))
    files = sorted(path.name for path in state.iterdir())
    assert [name[:11] for name in files] == ["parts.json", "shard-00001", "shard-00002"]
    assert read_tensors(state).keys()
    (state / files[1]).unlink()
    with pytest.raises(FileNotFoundError, match="shard-00001.* is missing, one of 2"):
        read_tensors(state)


@pytest.mark.parametrize(
    ("algorithm", "sections", "said"),
    [
        ("ppo", {}, "algorithm must do without a critic on 2 ranks, got ppo"),
        ("grpo", {"optimizer": {"name": "muon"}}, "optimizer.name must be adamw or sgd on several ranks"),
        ("grpo", {"rollout": {"engine": "vllm"}, "engine": {"serve": True}}, "engine.serve must be false on 2 ranks, "),
    ],
)
def test_what_can_not_be_sharded_is_refused(tmp_path: Path, algorithm: str, sections: Any, said: str) -> None:
    config = small_config(tmp_path, tmp_path, algorithm, **sections)
    check_ranks(config, Ranks())
    with pytest.raises(UserError, match=said):
        check_ranks(config, Ranks(0, 2))


def test_more_ranks_than_gpus_and_processes_with_no_place_to_meet_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in places(3)[2].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="at most one rank per GPU, got more than 2"), process_group(timeout_s=1.0):
        pass
    monkeypatch.delenv("RANK")
    alone = "WORLD_SIZE must be 1 or come from torchrun, got 3 without RANK"
    with pytest.raises(UserError, match=alone), process_group(timeout_s=1.0):
        pass


def test_a_rank_takes_as_many_passes_as_the_others() -> None:
    passes = [[0], [1], [2], [3], [4]]
    assert Ranks(0, 2).share(passes) == [[0], [2], [4]]
    assert Ranks(1, 2).share(passes) == [[1], [3], None]
    assert Ranks(2, 4).share(passes) == [[2], None]
    assert Ranks().share(passes) == passes
    assert Ranks(1, 2).share([]) == []


@pytest.mark.slow
def test_error_of_rank_0_alone_ends_all_at_once(tmp_path: Path) -> None:
    leader, other = start_ranks(2, ["-c", FAILS_ALONE])
    # Not the ten minutes that the other would wait for its sum.
    (left, said), (left_there, others) = (process.communicate(timeout=60) for process in (leader, other))
    assert "ValueError: on rank 0 alone" in said
    assert "RankLost: every rank must stay alive" in others
    assert (leader.returncode, other.returncode) == (1, 1)
    # A thread of a group that still runs when Python goes down would end the process with SIGABRT, now and then.
    assert left == left_there == "groups left: False\n"


FAILS_ALONE = """
import atexit
import torch
import torch.distributed
from agentloop.distributed.ranks import process_group, rank_failures
atexit.register(lambda: print("groups left:", torch.distributed.is_initialized()))
with process_group(timeout_s=600.0) as ranks:
    if ranks.index == 0:
        with rank_failures(), ranks.broadcasting("sum"):
            raise ValueError("on rank 0 alone")
    with rank_failures():
        assert ranks.receive() == "sum"
        ranks.sum(torch.zeros(1))
"""


@pytest.mark.parametrize("command", ["sft", "replay", "evaluate"])
def test_other_commands_are_refused_on_several_ranks(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(app, [command, "x.yaml"] if command != "replay" else [command, "stats"])
    assert isinstance(result.exception, UserError)
    assert f"must start train, which alone runs on several ranks, got {command}" in str(result.exception)


FULL = [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error (os error 28)")]


@pytest.mark.parametrize("cause", FULL)
def test_full_disk_is_told_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cause: Exception) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise CheckpointException("write", {1: (cause, StackSummary())})

    monkeypatch.setattr(tensor_files, "save", fails)
    with pytest.raises(UserError, match="run.folder must have room, got No space left"):
        write_directory(tmp_path / "x", lambda target: write_tensors(target, {"a": torch.ones(2)}, Ranks(0, 2)))
