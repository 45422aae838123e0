"""The processes that hold the policy's weights together. Rank 0 says what is done; the others do the same.

Every rank is given the whole batch and computes the weights of all its tokens, so that denominators are those of the
whole step without a word between ranks. Each takes its share of the passes, and what passes add up to is summed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from agentloop.errors import TrainingStopped

T = TypeVar("T")

_PATIENCE = timedelta(days=7)
"""For the next order: an iteration's episodes may take hours. A rank that has died is noticed at once all the same."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that learn together; without arguments it learns alone."""

    index: int = 0
    count: int = 1
    orders: Any = None
    """The process group that rank 0 speaks through."""

    @property
    def several(self) -> bool:
        return self.count > 1

    def share(self, passes: Sequence[T]) -> list[T | None]:
        """This rank's own of the passes, which come by length; None where it only keeps the others company.

        As many on every rank, for a pass through sharded weights takes all of them.
        """
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

    def tell(self, order: object) -> None:
        """Rank 0: every other rank hears it."""
        dist.broadcast_object_list([order], src=0, group=self.orders)

    def hear(self) -> Any:
        """The other ranks: the next order of rank 0, however long it takes."""
        heard = [None]
        dist.broadcast_object_list(heard, src=0, group=self.orders)
        return heard[0]


ALONE = Ranks()


def ranks_wanted() -> int:
    """How many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def own_rank() -> int:
    return int(os.environ.get("RANK", "0"))


@contextmanager
def joined(*, timeout_s: float) -> Iterator[Ranks]:
    """This process among those torchrun has started; alone without torchrun.

    At the end rank 0 sends the others home. A rank that is lost meanwhile is a TrainingStopped.
    """
    if ranks_wanted() == 1:
        yield ALONE
        return
    gpus = torch.cuda.is_available()
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=timeout_s)
    with lost_ranks_told():
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=timeout)
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=_PATIENCE))
    try:
        yield ranks
    finally:
        # Also after an error: the others wait for an order, and would for ever. Those who are gone need none.
        with _nobody_left_is_fine():
            if ranks.index == 0:
                ranks.tell(None)
    dist.destroy_process_group()


@contextmanager
def lost_ranks_told() -> Iterator[None]:
    """A collective that fails is a rank that is gone or says nothing: said so, instead of a backend's stack."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        if not _is_about_ranks(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise TrainingStopped(
            f"every rank must stay alive and answer within compute.rank_timeout_s, got {reason[:200]!r} on rank "
            f"{own_rank()}. See what the other ranks said; then go on from the last checkpoint with --resume."
        ) from error


def _is_about_ranks(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "nccl" in str(error).lower()


@contextmanager
def _nobody_left_is_fine() -> Iterator[None]:
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        if not _is_about_ranks(error):
            raise
