"""A checkpoint is whole or absent, whatever happens while it is written."""

import multiprocessing
import random
import signal
import time
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

from agentloop.distributed.tensor_files import read_tensors, write_tensors
from agentloop.errors import UserError
from agentloop.runs.checkpoint import load_checkpoint, prune, restore_random, save_checkpoint, write_directory
from agentloop.runs.run_folder import complete_checkpoints


def save_dummy_model(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_bytes(b"w" * 1000)


def save(folder: Path, number: int, **tensors: torch.Tensor) -> None:
    state = {"a": torch.full((1000,), float(number)), **tensors}
    values = {"number": number, "x": [1, None, "y"]}
    save_checkpoint(folder / f"{number:06d}", save_dummy_model, partial(write_tensors, tensors=state), values)


def test_checkpoint_round_trip_is_bit_equal(tmp_path: Path) -> None:
    tensors = {"a": torch.tensor([0.1, float("inf"), -0.0]), "t": torch.arange(6).reshape(2, 3).t()}
    save(tmp_path, 1, **tensors)
    loaded = load_checkpoint(tmp_path / "000001")
    assert loaded.values["x"] == [1, None, "y"]
    assert all(torch.equal(read_tensors(loaded.state)[name], tensors[name]) for name in tensors)
    assert (loaded.model / "weights").read_bytes() == b"w" * 1000


def test_checkpoint_restores_every_random_generator(tmp_path: Path) -> None:
    def numbers() -> list[float]:
        return [random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))]

    np.random.randn()  # leaves a cached second normal, which is part of the state
    save(tmp_path, 1)
    first = numbers()
    assert numbers() != first
    restore_random(load_checkpoint(tmp_path / "000001"))
    assert numbers() == first


@pytest.mark.parametrize("state", ["{", "[]", '{"a": ' * 10**5])
def test_checkpoint_whose_state_is_damaged_is_named(tmp_path: Path, state: str) -> None:
    save(tmp_path, 1)
    (tmp_path / "000001" / "state.json").write_text(state)
    with pytest.raises(UserError, match=r"checkpoint must be readable, got .* in .*/000001\. Remove it to resume"):
        load_checkpoint(tmp_path / "000001")


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    for number in (1, 2, 3, 10):
        save(tmp_path, number)
    prune(tmp_path, keep=2)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["000003", "000010"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000003", "000010"]


def test_checkpoint_failure_keeps_the_previous_and_leaves_no_rubbish(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"run.folder must have room, got No space left.*bytes free"):
        write_directory(tmp_path / "000002", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["000001"]


FORK = multiprocessing.get_context("fork")  # A process that starts anew imports torch for seconds.


def save_without_pause(folder: Path, number: int, said: Connection) -> None:
    said.send(number)
    while True:
        number += 1
        save(folder, number)
        said.send(number)
        prune(folder, keep=2)


def kill_while_saving(folder: Path, rng: random.Random) -> int:
    """Kill a process that saves without pause; the last checkpoint it said was saved."""
    complete = complete_checkpoints(folder)
    last = int(complete[-1].name) if complete else 0
    hearing, saying = FORK.Pipe(duplex=False)
    writer = FORK.Process(target=save_without_pause, args=(folder, last, saying))
    writer.start()
    saying.close()
    assert hearing.recv() == last
    time.sleep(rng.uniform(0.02, 0.3))
    writer.kill()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    with hearing, suppress(EOFError):
        while True:
            last = hearing.recv()
    return last


@pytest.mark.slow
def test_checkpoint_survives_kills_while_saving(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(5):
        acknowledged = kill_while_saving(tmp_path, rng)
        newest = complete_checkpoints(tmp_path)
        number = int(newest[-1].name) if newest else 0
        assert number >= acknowledged
        for path in newest:
            loaded = load_checkpoint(path)
            assert loaded.values["number"] == int(path.name)
            assert torch.equal(read_tensors(loaded.state)["a"], torch.full((1000,), float(path.name)))
        assert len(newest) >= min(2, number)
