"""The processes that hold the policy's weights together. Rank 0 says what is done; the others do the same.

Every rank is given the whole batch and computes the weights of all its tokens, so that denominators are those of the
whole step without a word between ranks. Each takes its share of the passes, and what passes add up to is summed.
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
"""For the next order: an iteration's episodes may take hours. A rank that has died is noticed at once all the same."""
_LEAVING_S = 10.0
"""For the end of a process group after an error."""


@dataclass
class Ranks:
    """This process among those that learn together; without arguments it learns alone."""

    index: int = 0
    count: int = 1
    control_group: Any = None
    """The process group that rank 0 speaks through."""
    others_listen: bool = True
    """Rank 0: they wait for an order, and are not in the middle of one."""

    @property
    def several(self) -> bool:
        return self.count > 1

    def share(self, passes: Sequence[T]) -> list[T | None]:
        """This rank's own of the passes, as many as each rank has; None where it only keeps the others company."""
        own: list[T | None] = [*passes[self.index :: self.count]]
        return own + [None] * (-(-len(passes) // self.count) - len(own))

    def sum(self, values: Tensor) -> Tensor:
        """Over all ranks, in place."""
        if self.several:
            dist.all_reduce(values)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """[n] of every rank, of any length each, one behind another by rank."""
        if not self.several:
            return values
        lengths = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(self.count)]
        dist.all_gather(lengths, torch.tensor([len(values)], device=values.device))
        longest = max(int(length) for length in lengths)
        places = [values.new_zeros(longest) for _ in range(self.count)]
        dist.all_gather(places, torch.cat([values, values.new_zeros(longest - len(values))]))
        return torch.cat([place[: int(length)] for place, length in zip(places, lengths, strict=True)])

    def gather_shared(self, found: Sequence[T]) -> list[T]:
        """What each rank has made of its `share`, of all ranks in the order before it."""
        each: list[Any] = [found] * self.count
        if self.several:
            dist.all_gather_object(each, found)
        return [one for turn in zip(*each, strict=True) for one in turn]

    def broadcast(self, call: object) -> None:
        """Rank 0: every other rank receives it."""
        dist.broadcast_object_list([call], src=0, group=self.control_group)

    @contextmanager
    def broadcasting(self, call: object) -> Iterator[None]:
        """Rank 0: every other rank receives the call, and makes it while this one makes it within."""
        self.others_listen = False
        self.broadcast(call)
        try:
            yield
        except TrainingStopped:
            self.others_listen = True  # of what they do together; they have met it too
            raise
        self.others_listen = True

    def receive(self) -> Any:
        """The other ranks: the next call of rank 0, however long it takes."""
        received = [None]
        dist.broadcast_object_list(received, src=0, group=self.control_group)
        return received[0]


ALONE = Ranks()


@contextmanager
def process_group(*, timeout_s: float, device: str = "auto") -> Iterator[Ranks]:
    """This process among those torchrun has started; alone without torchrun. `device` is `model.device`.

    At the end rank 0 sends the others home. A rank that is lost meanwhile is a RankLost. Raises UserError for more
    ranks than GPUs, and for ranks without a place to meet.
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
        # A backend may hold on to what nobody will answer any more; the error is shown all the same.
        leaving = Thread(target=_leave, args=(ranks,), daemon=True)
        leaving.start()
        leaving.join(_LEAVING_S)
        raise
    _leave(ranks)


def _leave(ranks: Ranks) -> None:
    """Rank 0 sends the others home, and the groups end with their threads: Python can't go down under one that runs.

    Also after an error: the others wait for an order, and would for ever. Those who are gone need none; those in the
    middle of one would learn it only after their timeout, but notice at once that this process ends.
    """
    with suppress(RankLost), rank_failures():  # there may be nobody left
        if ranks.index == 0 and ranks.others_listen:
            ranks.broadcast(None)
    ranks.control_group = None  # the last that holds on to that group
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
    """A collective that fails is a rank that is gone or says nothing: said so, instead of a backend's stack."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        if not is_about_ranks(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise RankLost(
            f"every rank must stay alive and answer within compute.rank_timeout_s, got {reason[:200]!r} on rank "
            f"{own_rank()}. See what the other ranks said; then go on from the last checkpoint with --resume."
        ) from error


def is_about_ranks(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "nccl" in str(error).lower()
