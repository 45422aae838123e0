"""The policy of a run as its updates begin with it: weights, what scores them, and the reference. Nothing acts here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentloop.config import RunConfig
from agentloop.engines.local.local_generator import LocalGenerator, StopStrings
from agentloop.models.actor import Actor
from agentloop.models.adapters import load_policy
from agentloop.models.loading import LoadedModel
from agentloop.models.reference import reference_policy
from agentloop.rollouts.actors import stop_strings
from agentloop.runs.checkpoint import Checkpoint
from agentloop.training.startup_checks import check_scoring

_TEXT = "The agent reads the question, calls a tool and waits for its answer."
"""Words that models know, for `check_scoring`."""


@dataclass(frozen=True)
class TrainedPolicy:
    """The weights that are trained, as they sample and as they are scored."""

    loaded: LoadedModel
    actor: Actor
    version: int
    local: LocalGenerator | None
    """None where an engine samples: on a GPU it has buffers and a copy of the weights."""
    reference: Actor | None
    """None where no part of the configuration measures a KL."""
    scores_are_stored: bool
    """Behavior log-probs of what the policy as it is sampled are its old ones."""


def load_trained_policy(config: RunConfig, first: Path | str, checkpoint: Checkpoint | None) -> TrainedPolicy:
    """The weights of the checkpoint, or the `first` ones of the run.

    Raises UserError for weights that can't be loaded, and for a model that is scored otherwise than it samples.
    """
    loaded = load_policy(config, first, saved=checkpoint.model if checkpoint else None)
    actor = Actor(loaded.model, packs=config.batch.packs, compute=config.compute)
    version = checkpoint.values["loop"]["iteration"] if checkpoint else 0
    local = LocalGenerator(
        loaded.model,
        stop_ids=loaded.stop_ids,
        stop_strings=StopStrings(stop_strings(config, loaded), loaded.codec),
        policy_version=version,
        compute=actor.compute,
    )
    agree = check_scoring(local, actor, text=loaded.codec.encode_text(_TEXT)[:16])
    sampled_here = config.rollout.engine == "local"
    return TrainedPolicy(
        loaded,
        actor,
        version,
        local if sampled_here else None,
        reference_policy(config, first, actor),
        scores_are_stored=agree and sampled_here and config.compute.old_log_probs == "auto",
    )
