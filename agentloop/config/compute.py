"""What a run can be told about how its numbers are made; none of it changes what they are, beyond rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from replay.section import PositiveFloat, Section

if TYPE_CHECKING:
    from agentloop.config import RunConfig


class ComputeSection(Section):
    log_probs: Literal["auto", "plain", "chunked", "triton"] = Field(
        "auto",
        description="How log-probs come of hidden states. plain: of whole logits; chunked: of parts of them, made anew "
        "in backward; triton: likewise, with kernels for CUDA; auto: triton where it can be, else chunked where the "
        "logits of a pass would have more than 64 MiB.",
    )
    autocast: Literal["none", "bfloat16"] = Field(
        "none",
        description="bfloat16: sampling, scoring and gradients multiply in it, the weights stay float32.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Backward makes the activations of each layer again: less memory for one more forward."
    )
    compile: bool = Field(
        False, description="The backbone is compiled for scoring and gradients; takes minutes when a run begins."
    )
    old_log_probs: Literal["auto", "recompute"] = Field(
        "auto",
        description="auto: those of rows that the policy as it is has just sampled are the stored ones, where sampling "
        "and scoring agree within 0.001 nats; recompute: a pass of their own for all rows.",
    )
    rank_timeout_s: PositiveFloat = Field(
        600.0, description="Several ranks: seconds to wait within an update for one that says nothing."
    )


def check_compute(config: RunConfig) -> None:
    """What would do nothing, or what can't be done together."""
    if config.compute.autocast != "none" and config.model.dtype != "float32":
        raise ValueError(
            f"compute.autocast must be none when model.dtype is {config.model.dtype}, for its weights are not "
            f"float32, got {config.compute.autocast}. Change one of them."
        )
