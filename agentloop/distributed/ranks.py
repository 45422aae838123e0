"""The processes that hold the policy's weights together. Rank 0 decides what to do; the others do the same.

Every rank receives the whole batch and computes the loss weights of all tokens. So each rank knows the denominators of
the whole step without communication. Each takes its share of the passes, and their results are summed over the ranks.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from agentloop.distributed.torchrun import own_rank, ranks_wanted
from agentloop.errors import RankLost, TrainingStopped, UserError

T = TypeVar("T")
_PATIENCE = timedelta(days=7)
"""The longest wait for rank 0's next call: episodes may take hours. A rank that has died is noticed at once."""
_LEAVING_S = 10.0
"""Seconds in which a process group must end after an error."""


@dataclass
class Ranks:
    """This process's place among the ranks that learn together. Without arguments it is the only one."""

    index: int = 0
    count: int = 1
    control_group: Any = None
    """The process group through which rank 0 sends its calls."""
    others_listen: bool = True
    """On rank 0: the other ranks wait for a call, and make none now."""

    @property
    def several(self) -> bool:
        return self.count > 1

    def share(self, passes: Sequence[T]) -> list[T | None]:
        """Return this rank's passes, as many as every rank has. None: in this pass the rank only takes part in
        collectives."""
        own: list[T | None] = [*passes[self.index :: self.count]]
        return own + [None] * (-(-len(passes) // self.count) - len(own))

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.several:
            dist.all_reduce(values)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """Concatenate the [n] values of all ranks, by rank. The lengths may differ."""
        return torch.cat([found.to(values.device) for found in self._of_all(values.cpu())])

    def gather_shared(self, found: Sequence[T]) -> list[T]:
        """Gather each rank's results for its `share`, in the order of the whole list."""
        return [one for turn in zip(*self._of_all(found), strict=True) for one in turn]

    def _of_all(self, found: Any) -> list[Any]:
        """Return what each rank has found, by rank."""
        each = [found] * self.count
        if self.several:
            dist.all_gather_object(each, found)
        return each

    def broadcast(self, call: object) -> None:
        """On rank 0: send a call to every other rank."""
        dist.broadcast_object_list([call], src=0, group=self.control_group)

    @contextmanager
    def broadcasting(self, call: object) -> Iterator[None]:
        """On rank 0: send a call to every other rank, which makes it while rank 0 makes it within the block."""
        self.others_listen = False
        self.broadcast(call)
        try:
            yield
        except TrainingStopped:
            self.others_listen = True  # the other ranks have raised it too, and wait again
            raise
        self.others_listen = True

    def receive(self) -> Any:
        """On the other ranks: wait for the next call of rank 0, without a time limit."""
        received = [None]
        dist.broadcast_object_list(received, src=0, group=self.control_group)
        return received[0]


ALONE = Ranks()


@contextmanager
def process_group(*, timeout_s: float, device: str = "auto") -> Iterator[Ranks]:
    """Join the ranks that torchrun has started; without torchrun this process is alone. `device` is `model.device`.

    At the end rank 0 ends the other ranks. Raises RankLost if a rank is lost meanwhile. Raises UserError if there are
    more ranks than GPUs, or torchrun's variables are missing.
    """
    if ranks_wanted() == 1:
        yield ALONE
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(
            f"WORLD_SIZE must be 1 or come from torchrun, got {ranks_wanted()} without {missing[0]}. Start with "
            "torchrun --nproc-per-node N -m agentloop train, or unset WORLD_SIZE."
        )
    gpus = device != "cpu" and torch.cuda.is_available()
    if gpus:
        _take_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=timeout_s)
    with rank_failures():
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=timeout)
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=_PATIENCE))
    try:
        yield ranks
    except BaseException:
        # A backend may wait for ranks that never answer; the error is shown all the same.
        leaving = Thread(target=_leave, args=(ranks,), daemon=True)
        leaving.start()
        leaving.join(_LEAVING_S)
        raise
    _leave(ranks)


def _leave(ranks: Ranks) -> None:
    """End the other ranks from rank 0, then the process groups with their threads, because Python can't exit while one
    runs.

    This is needed after an error too: ranks that wait for a call would wait for ever. Ranks in the middle of a call
    notice that this process ends.
    """
    with suppress(RankLost), rank_failures():  # all other ranks may be gone
        if ranks.index == 0 and ranks.others_listen:
            ranks.broadcast(None)
    ranks.control_group = None  # the last reference to that group
    dist.destroy_process_group()


def _take_gpu(place: int) -> None:
    if place >= torch.cuda.device_count():
        raise UserError(
            f"torchrun must start at most one rank per GPU, got more than {torch.cuda.device_count()} on this machine. "
            "Lower --nproc-per-node, or set model.device: cpu."
        )
    torch.cuda.set_device(place)


@contextmanager
def rank_failures() -> Iterator[None]:
    """Raise RankLost, instead of the backend's own error, where a collective fails: a rank is gone or silent."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        if not is_about_ranks(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise RankLost(
            f"every rank must stay alive and answer within compute.rank_timeout_s, got {reason[:200]!r} on rank "
            f"{own_rank()}. See the output of the other ranks; then continue from the last checkpoint with --resume."
        ) from error


def is_about_ranks(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "nccl" in str(error).lower()
