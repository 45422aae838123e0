"""Policies that two ranks hold in parts and publish, before an update and after it; this file starts the ranks."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from agentloop.config import RunConfig
from agentloop.distributed.ranks import Ranks, process_group
from agentloop.engines.publish.published_policy import PublishedPolicy
from agentloop.learning.ranked_trainer import RankedTrainer, TrainerSpec, serve_rank
from agentloop.models.actor import Actor
from agentloop.models.adapters import load_policy
from agentloop.models.loading import LoadedModel
from agentloop.models.policy_weights import PolicyWeights
from agentloop.training.policies.engine_publisher import Prober
from agentloop.training.policies.weights_for_engines import write_published
from tests.fakes.batch_rows import AUTHORS, ragged
from tests.fakes.ranks import forked_ranks
from tests.fakes.runs import small_config

NAMES = ("tied", "untied", "half", "lora")
"""Policies: with a head tied to the embeddings, with one of its own, with weights of 16 bits, with adapters."""


def config(folder: Path, name: str) -> RunConfig:
    lora = {"rank": 4 if name == "lora" else 0}
    made = small_config(folder, folder / name / "model", optimizer={"learning_rate": 1e-2}, lora=lora)
    dtype = "bfloat16" if name == "half" else "float32"
    return made.model_copy(update={"model": made.model.model_copy(update={"dtype": dtype})})


def loaded_policy(folder: Path, name: str) -> LoadedModel:
    return load_policy(config(folder, name), folder / name / "model")


def publish(target: Path, loaded: LoadedModel, weights: PolicyWeights) -> PublishedPolicy:
    probe = Prober(weights, "bfloat16", 0.7).probe(loaded.tokenizer)
    return write_published(target, weights, weights.save, probe=probe, run="r", version=1)


def publish_twice(folder: Path, name: str, ranks: Ranks) -> None:
    """Rank 0's: as it was loaded, and after an update, which a whole copy publishes as well."""
    chosen, loaded = config(folder, name), loaded_policy(folder, name)
    spec = TrainerSpec(chosen, folder / name / "model", None, AUTHORS)
    actor = Actor(loaded.model, compute=chosen.compute)
    leader = RankedTrainer(spec, ranks, actor, samples=False, reference=None)
    publish(folder / name / "two", loaded, leader.weights)
    leader.update(ragged(fresh=4, replayed=1), iteration=1)
    publish(folder / name / "two-updated", loaded, leader.weights)
    copy = loaded_policy(folder, name)
    leader.weights.copy_to(copy.model)
    publish(folder / name / "one-updated", copy, PolicyWeights(copy.model))
    ranks.broadcast(None)


def lead(folder: Path, place: Mapping[str, str]) -> None:
    os.environ.update(place)
    torch.set_num_threads(1)
    with process_group(timeout_s=60) as ranks:
        for name in NAMES:
            if ranks.index:
                serve_rank(ranks)
            else:
                publish_twice(folder, name, ranks)
        ranks.others_listen = False


if __name__ == "__main__":
    forked_ranks(lead, Path(sys.argv[1]))
