"""Recorded batches, updated on: by a process alone, or by the two ranks that this file starts."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from agentloop.config import RunConfig
from agentloop.config.sections.model import ComputeSection
from agentloop.distributed.ranks import ALONE, Ranks, process_group
from agentloop.learning.trainer import Trainer
from agentloop.models.actor import Actor
from agentloop.models.policy_weights import PolicyWeights, shard
from agentloop.models.token_log_probs import head
from replay.records import BatchRow
from tests.fakes.batch_rows import AUTHORS, ragged
from tests.fakes.ranks import forked_ranks
from tests.fakes.tiny_actors import LOSS, run_config, tiny_actor

UPDATES = 6
FRUGAL = 3
DTYPES = {"float64": torch.float64, "float32": torch.float32}


def config() -> RunConfig:
    """Passes of at most 40 tokens: one to four per step, and an odd number leaves one rank without a pass."""
    return run_config(
        batch={"mini_batch": 6, "micro_batch_tokens": 40},
        run={"iterations": 2 * UPDATES},
        optimizer={"learning_rate": 3e-3, "weight_decay": 0.01},
        loss={**LOSS, "entropy_coef": 0.01},
        kl={"loss_coef": 0.05},
    )


def batch(update: int) -> list[BatchRow]:
    return ragged(fresh=3 + 3 * (update % 3), replayed=1 + update % 4)


def learner(actor: Actor, ranks: Ranks = ALONE) -> Trainer:
    """Sharded where there are several ranks, and asked as a run asks it; the reference is whole on each."""
    if ranks.several:
        shard(actor.model)
        actor.probe()
    reference = tiny_actor(actor.dtype)
    reference.model.requires_grad_(False)
    return Trainer(actor, config(), authors=AUTHORS, reference=reference, ranks=ranks)


def updated(trainer: Trainer, first: int, last: int) -> list[dict[str, Any]]:
    """What each update said, numbers by name: metrics and the statistics of every row."""
    told = []
    for update in range(first, last + 1):
        result = trainer.update(batch(update), iteration=update)
        rows = {f"{name}/{key}": value for name, stats in result.rows.items() for key, value in stats.items()}
        told.append({**result.metrics, **rows})
    return told


def whole(actor: Actor) -> dict[str, torch.Tensor]:
    copy = tiny_actor(actor.dtype)
    PolicyWeights(actor.model).copy_to(copy.model)
    return {name: tensor.detach().clone() for name, tensor in copy.model.named_parameters()}


def go_on(folder: Path, dtype: torch.dtype, ranks: Ranks = ALONE) -> list[dict[str, Any]]:
    """The second half of the updates, from a checkpoint that others may have written."""
    actor = tiny_actor(dtype)
    actor.model.load_state_dict(load_file(folder / "weights.safetensors"), strict=False)
    trainer = learner(actor, ranks)
    trainer.load(folder / "state")
    return updated(trainer, UPDATES // 2 + 1, UPDATES)


def first_half(folder: Path, dtype: torch.dtype, ranks: Ranks = ALONE) -> tuple[Trainer, Actor, list[dict[str, Any]]]:
    """The first half, and a checkpoint of it in `folder`."""
    actor = tiny_actor(dtype)
    trainer = learner(actor, ranks)
    told = updated(trainer, 1, UPDATES // 2)
    trainer.save(folder / "state")
    weights = whole(actor)
    if ranks.index == 0:
        save_file(weights, folder / "weights.safetensors")
    return trainer, actor, told


def frugal(ranks: Ranks) -> list[dict[str, Any]]:
    """Three updates with packed rows, log-probs of chunks and activations made again."""
    head._PLAIN_BYTES = 0
    compute = ComputeSection(gradient_checkpointing=True)
    actor = Actor(tiny_actor(torch.float64).model, packs=True, compute=compute)
    return updated(learner(actor, ranks), 1, FRUGAL)


def learn(folder: Path, place: Mapping[str, str]) -> None:
    os.environ.update(place)
    torch.set_num_threads(1)
    with process_group(timeout_s=60) as ranks:
        for name, dtype in DTYPES.items():
            trainer, actor, told = first_half(folder / name / "two", dtype, ranks)
            told += updated(trainer, UPDATES // 2 + 1, UPDATES)
            weights = whole(actor)
            resumed = go_on(folder / name / "one", dtype, ranks) if name == "float64" else []
            if ranks.index == 0:
                save_file(weights, folder / name / "two.safetensors")
                (folder / name / "two.json").write_text(json.dumps({"unbroken": told, "resumed": resumed}))
        told = frugal(ranks)
        if ranks.index == 0:
            (folder / "frugal.json").write_text(json.dumps(told))


if __name__ == "__main__":
    forked_ranks(learn, Path(sys.argv[1]))
