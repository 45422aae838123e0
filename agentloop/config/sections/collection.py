"""What the configuration says about who collects episodes, and how far collecting may run ahead of learning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from agentloop.config.sections.loss import UNBOUNDED, StreamLossSection
from replay.setting_types import PositiveFloat, Section

if TYPE_CHECKING:
    from agentloop.config.run_config import RunConfig


class CollectionSection(Section):
    by: Literal["loop", "workers"] = Field(
        "loop",
        description="loop: the training process runs the episodes; workers: `agentloop worker` does, in as many "
        "processes and on as many machines as there are. See docs/scaling.md.",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="Most publishes between the sampling of a fresh trajectory and the update that learns from it. 0: "
        "workers and learner take turns; 1: workers are one batch ahead; and so on. Nothing is thrown away for it.",
    )
    samples_per_insert: PositiveFloat | None = Field(
        None,
        description="While a batch is not collected yet, the learner goes on with batches of replayed rows alone, as "
        "long as all rows learned from are at most this many times the collected ones; null: it waits.",
    )
    lease_s: PositiveFloat = Field(
        60.0, description="Seconds after which a worker, or the learner, that says nothing counts as gone."
    )


def check_collection(config: RunConfig) -> None:
    """Raises ValueError where workers can't collect what the run asks for, or the loss can't learn from it."""
    section = config.collection
    if section.by == "loop":
        for name, default in (("max_staleness", 0), ("samples_per_insert", None)):
            if getattr(section, name) != default:
                raise ValueError(
                    f"collection.{name} must be left out when collection.by is loop, got {getattr(section, name)}: "
                    "the loop learns from what it has just sampled. Set collection.by: workers."
                )
        return
    for key, given, right in _needed(config):
        if given != right:
            raise ValueError(
                f"{key} must be {_plain(right)} when collection.by is workers, got {_plain(given)}. "
                "Set it, or collection.by: loop."
            )
    if section.samples_per_insert is not None and section.max_staleness == 0:
        raise ValueError(
            "collection.max_staleness must be at least 1 when collection.samples_per_insert is set, got 0: each update "
            "in between makes the rows that are being collected older by one."
        )
    if section.max_staleness > 0:
        _check_off_policy(config.loss.fresh, section.max_staleness)


def _check_off_policy(fresh: StreamLossSection, staleness: int) -> None:
    """Fresh rows were sampled by an earlier policy: the loss must say what it does about that."""
    if fresh.correction.kind != "none":
        return
    advice = "Set it, or loss.fresh.correction.kind: truncate."
    if fresh.objective in UNBOUNDED:
        raise ValueError(
            f"loss.fresh.objective must be one that stays near the policy that sampled when collection.max_staleness "
            f"is above 0 ({staleness}), such as ppo_clip, got {fresh.objective}. {advice}"
        )
    if fresh.anchor != "behavior":
        raise ValueError(
            f"loss.fresh.anchor must be behavior when collection.max_staleness is above 0 ({staleness}), for the old "
            f"policy is not the one that sampled, got {fresh.anchor}. {advice}"
        )


def _needed(config: RunConfig) -> list[tuple[str, object, object]]:
    """Keys that must be so: other values need the policy where episodes are run, or a whole iteration at once."""
    remax = config.algorithm == "remax"
    return [
        ("rollout.engine", config.rollout.engine, "vllm"),
        ("algorithm", config.algorithm, "grpo" if remax else config.algorithm),
        ("rollout.dynamic_sampling_rounds", config.rollout.dynamic_sampling_rounds, 0),
        ("reward.model.path", config.reward.model.path, None),
        ("tasks.curriculum", config.tasks.curriculum, "none"),
        ("replay.dedupe", config.replay.dedupe, False),
        ("replay.redact", config.replay.redact, None),
    ]


def _plain(value: object) -> str:
    return {None: "null", False: "false"}.get(value, str(value))  # type: ignore[call-overload, no-any-return]
