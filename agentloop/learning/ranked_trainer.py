"""The trainer of a run, in this process alone or on every rank. Other ranks repeat the calls of rank 0."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from agentloop.algorithms.catalog import ALGORITHMS
from agentloop.config import RunConfig
from agentloop.distributed.ranks import Ranks, rank_failures
from agentloop.errors import RankLost, TrainingStopped, UserError
from agentloop.learning.trainer import Trainer
from agentloop.learning.update_stats import UpdateResult
from agentloop.models.actor import Actor
from agentloop.models.adapters import WithoutAdapters, load_policy, reference_policy
from agentloop.models.policy_weights import PolicyWeights, RowScores, shard
from agentloop.runs.checkpoint import seed_process
from context.authors import AuthorTable
from replay.records import BatchRow

T = TypeVar("T")
_TRAINER, _WEIGHTS = "trainer", "weights"


@dataclass(frozen=True)
class TrainerSpec:
    """The parts from which every rank builds its trainer; rank 0 sends them first."""

    config: RunConfig
    first: Path | str
    """The weights that the run began with."""
    saved: Path | None
    """The weights of a checkpoint to continue from."""
    authors: AuthorTable


def check_ranks(config: RunConfig, ranks: Ranks) -> None:
    """Raise UserError for settings that do not work on several ranks."""
    if not ranks.several:
        return
    if ALGORITHMS[config.algorithm].needs_critic:
        raise UserError(f"algorithm must do without a critic on {ranks.count} ranks, got ppo. Use grpo, or one rank.")
    if config.engine.serve:
        raise UserError(
            f"engine.serve must be false on {ranks.count} ranks, got true. Start `agentloop engine` on a GPU of its "
            "own, and name its URL in engine.urls."
        )
    if config.optimizer.name not in ("adamw", "sgd"):
        raise UserError(
            f"optimizer.name must be adamw or sgd on several ranks, as others look at whole matrices, got "
            f"{config.optimizer.name}. Change it, or train on one rank."
        )


def _together(ranks: Ranks, part: str, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Call a method of rank 0's trainer or weights. The other ranks get the call first, so that all make it."""
    with rank_failures(), ranks.broadcasting((part, call.__name__, arguments, named)):
        return call(*arguments, **named)


class RankedWeights(PolicyWeights):
    """The sharded weights of rank 0: each call asks the other ranks for their parts."""

    def save(self, folder: Path) -> None:
        _together(self._ranks, _WEIGHTS, super().save, folder)

    def save_head(self, file: Path, name: str) -> None:
        _together(self._ranks, _WEIGHTS, super().save_head, file, name)

    def scores(
        self, rows: Sequence[Sequence[int]], *, number_type: str, temperature: float, most: int
    ) -> list[RowScores]:
        settings = {"number_type": number_type, "temperature": temperature, "most": most}
        return _together(self._ranks, _WEIGHTS, super().scores, rows, **settings)

    def copy_to(self, copy: nn.Module | None) -> None:
        with rank_failures(), self._ranks.broadcasting((_WEIGHTS, "copy_to", (None,), {})):
            super().copy_to(copy)  # the others have no copy


class RankedTrainer:
    """The trainer of rank 0. It announces each call to the other ranks first, so that all make the same call."""

    def __init__(
        self, spec: TrainerSpec, ranks: Ranks, actor: Actor, *, samples: bool, reference: Actor | None
    ) -> None:
        """With `samples` the actor's model stays whole, because it samples in this process; `publish` copies the
        sharded weights into it. Otherwise the model itself is sharded.
        """
        self._copy = actor.model if samples else None
        self._ranks = ranks
        with rank_failures(), ranks.broadcasting(spec):
            model, self._trainer = _sharded(spec, ranks, None if samples else actor.model, reference)
        self.weights = RankedWeights(model, ranks)

    def update(self, rows: Sequence[BatchRow], *, iteration: int) -> UpdateResult:
        return _together(self._ranks, _TRAINER, self._trainer.update, rows, iteration=iteration)

    def score_only(self, rows: Sequence[BatchRow]) -> UpdateResult:
        return _together(self._ranks, _TRAINER, self._trainer.score_only, rows)

    def save(self, folder: Path) -> None:
        _together(self._ranks, _TRAINER, self._trainer.save, folder)

    def load(self, folder: Path) -> None:
        _together(self._ranks, _TRAINER, self._trainer.load, folder)

    def publish(self) -> None:
        """Make the current weights the policy that samples in this process."""
        self.weights.copy_to(self._copy)


Learner = Trainer | RankedTrainer
"""The trainer that the loop calls, on one rank or on several."""


def serve_rank(ranks: Ranks) -> None:
    """Repeat the calls of rank 0 on another rank, until rank 0 ends the calls.

    Only rank 0 answers signals. When rank 0 is gone, TrainingStopped is raised.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with rank_failures():
        spec = ranks.receive()
    if spec is None:
        return
    with rank_failures():
        seed_process(spec.config)
        model, trainer = _sharded(spec, ranks, None, None)
    parts = {_TRAINER: trainer, _WEIGHTS: PolicyWeights(model, ranks)}
    while True:
        with rank_failures():
            call = ranks.receive()
        if call is None:
            return
        part, name, arguments, named = call
        try:
            with rank_failures():
                getattr(parts[part], name)(*arguments, **named)
        except RankLost:
            raise  # ranks that wait for this one notice
        except TrainingStopped:
            continue  # rank 0 has met the same error, and decides what follows


def _sharded(
    spec: TrainerSpec, ranks: Ranks, model: PreTrainedModel | None, reference: Actor | None
) -> tuple[PreTrainedModel, Trainer]:
    """Return this rank's part of the policy, and its trainer. None as `model` loads the policy first.

    The reference is not sharded. It is made here if it is None, or the policy without its adapters.
    """
    config = spec.config
    if model is None:
        model = load_policy(config, spec.first, saved=spec.saved).model
    shard(model)
    actor = Actor(model, packs=config.batch.packs, compute=config.compute)
    actor.probe()
    if reference is None or isinstance(reference, WithoutAdapters):
        reference = reference_policy(config, spec.first, actor)
    return model, Trainer(actor, config, authors=spec.authors, reference=reference, ranks=ranks)
