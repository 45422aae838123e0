"""What the configuration says about advantages: the algorithm that gives them, and whose credit they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from agentloop.config.sections.loss import Bc
from replay.config import check_task_pool
from replay.setting_types import Fraction, NonNegative, Section

if TYPE_CHECKING:
    from agentloop.config import RunConfig


COMPARING = frozenset({"grpo", "dr_grpo", "rloo", "opo"})
"""Algorithms by which the members of a group are compared with each other, and one of equal rewards has no signal."""
_DIVIDING_BY_ITERATION = {"reinforce++": "reinforce", "reinforce++_baseline": "dr_grpo"}
"""Algorithms that divide by the deviation of all groups of an iteration, and what they are without."""


class AdvantageSection(Section):
    normalise_std: bool | None = Field(
        None,
        description="Divide by the group's standard deviation; null: if the algorithm is grpo, or ppo, whose samplers "
        "alone look at it. No other one may; reinforce++ and reinforce++_baseline divide by the whole iteration's.",
    )
    function: str | None = Field(
        None,
        description="`path/to/file.py:function` that is given the members of a group and returns their advantages, in "
        "the algorithm's place.",
    )
    normalise_batch: Literal["none", "scale", "whiten"] = Field(
        "none",
        description="Divide the advantages of each stream of the batch by their standard deviation (scale), and take "
        "off their mean first (whiten); where groups are compared, those of exactly 0 stay 0.",
    )
    credit: Literal["trajectory", "turn"] = Field(
        "trajectory",
        description="trajectory: one advantage for all its tokens; turn: each reply has its own, of what the "
        "environment's turn_rewards give it and what follows.",
    )
    turn_gamma: Fraction = Field(1.0, description="Discount per turn of what follows a reply (credit turn).")
    turn_coef: NonNegative = Field(1.0, description="Weight of turn rewards beside the final reward (credit turn).")


def normalises_std(config: RunConfig) -> bool:
    given = config.advantage.normalise_std
    return config.algorithm in ("grpo", "ppo") if given is None else given


def check_advantages(config: RunConfig) -> None:
    """Raises ValueError where the parts of the configuration ask for advantages nobody can give."""
    section, algorithm = config.advantage, config.algorithm
    if algorithm == "ppo":
        _check_critic(config)
    if section.normalise_std and algorithm not in ("grpo", "ppo"):
        raise ValueError(
            f"advantage.normalise_std must be null or false when algorithm is {algorithm}, got true. Only grpo divides "
            "by the group's standard deviation; advantage.normalise_batch divides by the batch's."
        )
    if section.function is not None and algorithm != "grpo":
        raise ValueError(
            f"algorithm must be left out when advantage.function takes its place, got {algorithm} and "
            f"{section.function}. Remove one of them."
        )
    if section.normalise_std is not None and section.function is not None:
        raise ValueError(
            "advantage.normalise_std must be null when advantage.function is set, whose numbers are taken as they are, "
            f"got {str(section.normalise_std).lower()}. Remove it."
        )
    if section.normalise_std is False and algorithm in _DIVIDING_BY_ITERATION:
        raise ValueError(
            f"advantage.normalise_std must be null when algorithm is {algorithm}, which divides by the deviation of "
            f"the whole iteration, got false. Remove it, or set algorithm: {_DIVIDING_BY_ITERATION[algorithm]}."
        )
    if section.credit == "turn":
        _check_turns(config)
    elif (section.turn_gamma, section.turn_coef) != (1.0, 1.0):
        name = "turn_gamma" if section.turn_gamma != 1.0 else "turn_coef"
        raise ValueError(
            f"advantage.{name} must be 1 when advantage.credit is trajectory, which knows no turns, got "
            f"{getattr(section, name)}. Take it out, or set advantage.credit: turn."
        )
    if config.rollout.dynamic_sampling_rounds:
        _check_dynamic_sampling(config)
    if config.replay.complete_zero_variance:
        _check_compares(config, "replay.complete_zero_variance must be false")
    if config.replay_trains() and config.replay.baseline != "stored":
        _check_baseline(config)


def _check_critic(config: RunConfig) -> None:
    """Its advantages are of tokens, and made in the update: what is set for trajectories would change nothing."""
    section, replay = config.advantage, config.replay
    without_signal = {
        "advantage.function": (section.function, None),
        "advantage.normalise_batch": (section.normalise_batch, "none"),
        "advantage.credit": (section.credit, "trajectory"),
        "replay.baseline": (replay.baseline, "stored"),
        "replay.negative_weight": (replay.negative_weight, 1.0),
    }
    for name, (given, default) in without_signal.items():
        if given != default:
            raise ValueError(
                f"{name} must be {'null' if default is None else default} when algorithm is ppo, whose critic gives "
                f"the advantages, got {given}. Take it out."
            )


def _check_turns(config: RunConfig) -> None:
    section, algorithm = config.advantage, config.algorithm
    if section.function is not None or algorithm in ("opo", "remax", "reinforce++_baseline"):
        cause = "advantage.function is set" if section.function is not None else f"algorithm is {algorithm}"
        raise ValueError(
            f"advantage.credit must be trajectory when {cause}, which has no baseline for a turn, got turn. "
            "Use grpo, dr_grpo, rloo, reinforce or reinforce++."
        )
    if config.replay_trains() and config.replay.baseline == "stored" and algorithm != "reinforce":
        raise ValueError(
            "replay.baseline must not be stored when advantage.credit is turn: rows are stored with the advantage of "
            "the whole trajectory alone. Use shared, split, fresh_only or leave_one_out."
        )
    loss = config.loss.replay
    blind = any(
        isinstance(part, Bc) and part.weighting == "uniform" for part in (loss.objective, loss.missing_log_probs)
    )
    if config.replay.negative_weight != 1.0 and blind:
        raise ValueError(
            "replay.negative_weight must be 1 when advantage.credit is turn and loss.replay has bc with weighting "
            f"uniform, which knows no negative turns, got {config.replay.negative_weight:g}. Remove it, or set "
            "weighting: advantage."
        )


def _check_dynamic_sampling(config: RunConfig) -> None:
    rounds = config.rollout.dynamic_sampling_rounds
    _check_compares(config, "rollout.dynamic_sampling_rounds must be 0")
    if config.advantage.credit == "turn":
        raise ValueError(
            f"rollout.dynamic_sampling_rounds must be 0 when advantage.credit is turn, got {rounds}: "
            "a group of equal rewards can teach by its turns."
        )
    if config.replay.unit in ("trajectory", "task"):
        raise ValueError(
            f"rollout.dynamic_sampling_rounds must be 0 when replay.unit is {config.replay.unit}, got "
            f"{rounds}: replayed members are of the tasks that were planned. Use unit any or "
            "group, or replay.complete_zero_variance."
        )


def _check_compares(config: RunConfig, rule: str) -> None:
    if config.algorithm == "reinforce++_baseline":
        raise ValueError(
            f"{rule} when algorithm is {config.algorithm}, which measures all groups of an iteration at once. Remove "
            f"it, or use {', '.join(sorted(COMPARING))}."
        )
    if config.algorithm not in COMPARING:
        raise ValueError(
            f"{rule} when algorithm is {config.algorithm}, by which a group of equal rewards teaches too. Remove it, "
            f"or use {', '.join(sorted(COMPARING))}."
        )


def _check_baseline(config: RunConfig) -> None:
    replay = config.replay
    if config.algorithm in ("reinforce", "remax"):
        raise ValueError(
            f"replay.baseline must be stored when algorithm is {config.algorithm}, by which no trajectory is compared "
            f"with others, got {replay.baseline}. Leave it out."
        )
    if config.advantage.function is not None and replay.baseline not in ("shared", "split"):
        raise ValueError(
            f"replay.baseline must be stored, shared or split when advantage.function is set, got {replay.baseline}. "
            "The function sees whole groups, and which members are replayed."
        )
    if replay.complete_zero_variance and replay.baseline not in ("shared", "leave_one_out"):
        raise ValueError(
            f"replay.complete_zero_variance must be false when replay.baseline is {replay.baseline}, which compares "
            "fresh members with fresh ones alone, got true. Use stored, shared or leave_one_out."
        )
    needs_fresh = replay.baseline == "fresh_only" or replay.unit != "group"
    by_task = config.algorithm in (*COMPARING, "reinforce++_baseline")
    if by_task and needs_fresh:
        check_task_pool(config.tasks, config.environment, f"replay.baseline is {replay.baseline}")
