"""Settings of how weights are moved: optimizers, the critic, the distance kept to a reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from replay.config import BatchSize
from replay.setting_types import BelowOne, Fraction, NonNegative, Positive, PositiveFloat, Section

if TYPE_CHECKING:
    from agentloop.config import RunConfig


class OptimizerSection(Section):
    name: Literal["adamw", "sgd", "muon"] = Field(
        "adamw", description="What makes steps of gradients: see docs/algorithms.md. muon has AdamW for the rest."
    )
    learning_rate: PositiveFloat = Field(1.5e-3, description="Peak learning rate.")
    warmup_iterations: int = Field(0, ge=0, description="Iterations over which the learning rate rises.")
    schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="The learning rate after that.")
    final_factor: Fraction = Field(0.1, description="Learning rate at the end, as a share of the peak.")
    betas: tuple[BelowOne, BelowOne] = Field(
        (0.9, 0.95), description="Decay of the means of gradient and squared gradient: of adamw, and where muon has it."
    )
    momentum: BelowOne = Field(0.95, description="Momentum of sgd, and of muon's matrices.")
    weight_decay: NonNegative = Field(
        0.0, description="Share of the weights taken off, times the learning rate (sgd: added to the gradient)."
    )
    max_grad_norm: PositiveFloat = Field(1.0, description="Gradients are scaled down to this norm.")


class CriticSection(Section):
    """The critic of `algorithm: ppo`; no other algorithm has one."""

    gamma: Fraction = Field(1.0, description="Discount per action token.")
    gae_lambda: Fraction = Field(0.95, description="GAE's lambda: 0 trusts the critic, 1 only what was earned.")
    bootstrap_truncated: bool = Field(
        True,
        description="An episode that a limit cut off goes on in the critic's eyes: its value stands for the rest; "
        "false: it ends there with what it earned. See docs/algorithms.md.",
    )
    value_clip: PositiveFloat | None = Field(0.5, description="Values move at most this far in an update; null: free.")
    whiten_advantages: bool = Field(True, description="Whiten advantages by mean and deviation of the fresh rows.")
    warmup_iterations: int = Field(0, ge=0, description="First iterations in which only the critic learns.")
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection, description="What moves the critic.")


class KlSection(Section):
    loss_coef: NonNegative = Field(0.0, description="Weight of the KL to the reference in the loss.")
    loss_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="Its estimator; see docs/algorithms.md.")
    loss_gradient: Literal["plain", "importance"] = Field(
        "plain",
        description="Its gradient. plain: the estimator's own (of k1: nothing on average; of k2: the KL's for fresh "
        "tokens); importance: the KL's for replayed tokens too (k1, k3). Like its estimator of no effect where "
        "loss_coef is 0.",
    )
    reward_coef: NonNegative = Field(0.0, description="Weight of the per-token KL to the reference in the rewards.")
    reward_estimator: Literal["k1", "k2", "k3"] = Field("k1", description="Its estimator (with reward_coef).")
    reference: Literal["auto", "copy"] = Field(
        "auto",
        description="copy: the starting policy, frozen; auto: a policy with adapters is its own reference, without "
        "them.",
    )


def check_learning(config: RunConfig) -> None:
    """Raises ValueError where an optimizer would stand still."""
    run = config.run
    optimizers = {"optimizer": config.optimizer, "critic.optimizer": config.critic.optimizer}
    for where, optimizer in optimizers.items() if run.iterations > run.schedule_length else ():
        if optimizer.schedule != "constant" and optimizer.final_factor == 0:
            raise ValueError(
                f"{where}.final_factor must be above 0 when run.iterations ({run.iterations}) goes beyond the "
                f"iterations of the schedule ({run.schedule_length}), got 0: nothing would be learned there. "
                "Begin a new run with the trained weights: --set model.path=RUN/model."
            )


class BatchSection(BatchSize, Section):
    mini_batch: Positive = Field(64, description="Trajectories per optimizer step.")
    ppo_epochs: Positive = Field(1, description="Passes over the batch in one iteration.")
    micro_batch_tokens: Positive = Field(1536, description="Tokens per pass with padding; for speed and memory only.")
    layout: Literal["auto", "padded", "packed"] = Field(
        "auto",
        description="Rows of a pass: padded to one width, or packed one behind another, without padding, what "
        "neighbours begin with computed once; auto: packed on a GPU whose flash-attention takes rows of any length, "
        "elsewhere padded.",
    )

    @property
    def packs(self) -> bool | None:
        """True if `layout` is packed, False if it is padded, None if it is auto."""
        return {"auto": None, "padded": False, "packed": True}[self.layout]
