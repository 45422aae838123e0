"""The losses that the configuration names, one for each stream."""

from dataclasses import replace
from functools import partial

from agentloop.algorithms.catalog import OBJECTIVES
from agentloop.algorithms.heterogeneous import StreamLoss
from agentloop.config.sections.loss import LossSection, OwnObjective, PlainMissing, StreamLossSection
from agentloop.learning.own_algorithm import load_own_objective

Losses = dict[str, StreamLoss]
"""By the names of their sections: fresh, replay and, where it is configured, hinted."""


def stream_losses(section: LossSection) -> Losses:
    """Make the losses, running the files of users' objectives. Raises UserError if a file or function is missing."""
    return {name: _stream_loss(f"loss.{name}", part) for name, part in section.parts().items()}


def _stream_loss(where: str, section: StreamLossSection) -> StreamLoss:
    objective, missing = section.objective, section.missing_log_probs
    if isinstance(objective, OwnObjective):
        # Nobody knows what it looks at: it sees whole trajectories, and every row with a trained token.
        own = load_own_objective(objective.name, objective.arguments, what=f"{where}.objective")
        built = StreamLoss(own, section.anchor, whole_trajectories=True, needs_advantage=False)
    else:
        kind = OBJECTIVES[objective.name]
        built = StreamLoss(
            partial(kind.function, **objective.arguments),
            section.anchor,
            whole_trajectories=kind.whole_trajectories,
            needs_advantage=kind.needs_advantage,
        )
    if isinstance(missing, PlainMissing):
        return built
    other = OBJECTIVES[missing.name]
    return replace(
        built,
        missing=partial(other.function, **missing.arguments),
        needs_advantage=built.needs_advantage and other.needs_advantage,
    )
