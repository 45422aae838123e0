"""Processes that learn together, started as torchrun starts them but without its agent, which takes seconds."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from agentloop.engines.serving.engine_process import free_port
from tests.fakes.runs import ROOT


def forked_ranks(work: Callable[[Path, Mapping[str, str]], None], folder: Path) -> None:
    """Two ranks, which share what has been imported: that takes longer than what they do."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=work, args=(folder, place)) for place in places(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]


def places(count: int) -> list[dict[str, str]]:
    """What torchrun tells each rank by its environment."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def start_ranks(count: int, command: Sequence[str | Path]) -> list[subprocess.Popen[str]]:
    """`python <command>` on every rank; their output can be read."""
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=ROOT,
            env={**os.environ, **settings, **place},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in places(count)
    ]


@contextmanager
def group_of_one(folder: Path) -> Iterator[DeviceMesh]:
    """This process alone as a process group.

    torch keeps the layouts of sharded tensors in the state of the thread, and the group with them. A child that another
    thread forks takes that state down, ends the group without having its threads, and crashes: they are forgotten here.
    """
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()
