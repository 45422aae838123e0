"""What a run can be told. Every key with its meaning, its default and its rule; unknown keys are errors.

Reading a file (line numbers, nearest keys, overrides) is `config_file`'s job; this module only says what is valid.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from agentloop.config.advantage import AdvantageSection, check_advantages
from agentloop.config.compute import ComputeSection, check_compute
from agentloop.config.context import ContextSection
from agentloop.config.learning import CriticSection, KlSection, OptimizerSection, check_learning
from agentloop.config.lora import LoraSection
from agentloop.config.loss import LossSection
from agentloop.config.reward import RewardSection
from agentloop.config.sft import SftSection
from agentloop.config.tasks import TasksSection, check_tasks
from replay.config import BatchSize, ReplayConfig, RunLength, TaskPool
from replay.mixing.rule import MixRule
from replay.section import Fraction, NonNegative, Positive, PositiveFloat, Section


class RunSection(RunLength, Section):
    name: str = Field(
        "run", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="Name of the run; part of its folder's name."
    )
    folder: str = Field("runs", description="Where run folders are made: <folder>/<name>-001, -002, ...")
    threads: Positive = Field(1, description="CPU threads torch may use. One is fastest for tiny models.")
    stop_at_success: Fraction | None = Field(
        None,
        description="End early once held-out success reaches this in two evaluations in a row; null: never.",
    )


class ModelSection(Section):
    path: str | None = Field(
        None,
        description="Folder or id of a Hugging Face causal LM; null: the built-in tiny model, warmed up first.",
    )
    revision: str | None = Field(None, description="Commit of a hub model.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model lives; auto: cuda if there is one."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Type of the weights.")
    trust_remote_code: bool = Field(False, description="Run code that comes with the model. Off unless written here.")


class TinyModelSection(Section):
    """The model built from a seed when `model.path` is null."""

    layers: Positive = Field(2, description="Decoder layers.")
    hidden: Positive = Field(128, description="Width of the residual stream.")
    vocabulary: int = Field(560, ge=300, description="Size of the byte-level BPE vocabulary.")


class WarmUpSection(Section):
    """Supervised warm-up of the tiny model on careless demonstrations."""

    max_updates: int = Field(600, ge=0, description="Most updates of the warm-up.")
    batch: Positive = Field(8, description="Demonstrations per update.")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Environment options of the demonstrated tasks, over those of the environment.",
    )
    loss_target: PositiveFloat = Field(
        0.1, description="Smoothed loss of the last reply's hardest token at which copying counts as learned."
    )
    updates_after_target: int = Field(80, ge=0, description="Updates made after that.")
    learning_rate_matrices: PositiveFloat = Field(2e-2, description="Muon's learning rate, for hidden matrices.")
    learning_rate_rest: PositiveFloat = Field(5e-3, description="AdamW's learning rate, for the rest.")


class EnvironmentSection(TaskPool, Section):
    name: str = Field(
        "lookup_chain",
        description="Built-in environment, or `path/to/file.py:ClassName` for one of your own.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the environment.")


class RolloutSection(Section):
    max_turns: Positive = Field(9, description="Most replies of the policy in one episode.")
    max_tokens_per_turn: Positive = Field(40, description="Most tokens of one reply.")
    parallel: Positive = Field(256, description="Most episodes run at once; bounds the memory of the key-value cache.")
    success_reward: float = Field(1.0, description="An episode is a success from this reward on.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature; stored with the log-probs.")
    tool_timeout_s: PositiveFloat = Field(10.0, description="Seconds a tool call may take.")
    tool_output_chars: Positive = Field(20_000, description="Longest tool result shown to the policy, in characters.")
    recollect_rounds: int = Field(
        0,
        ge=0,
        description="Most rounds in which groups of equal rewards are replaced by groups of further tasks (dynamic "
        "sampling); 0: they stay.",
    )


class BatchSection(BatchSize, Section):
    mini_batch: Positive = Field(64, description="Trajectories per optimizer step.")
    ppo_epochs: Positive = Field(1, description="Passes over the batch in one iteration.")
    micro_batch_tokens: Positive = Field(
        1536, description="Tokens per forward-backward pass, padding included; changes speed and memory only."
    )
    layout: Literal["padded", "packed"] = Field(
        "padded",
        description="Rows of a pass: padded to one width, or packed one behind another, without padding. Packed is "
        "quicker with flash-attention, which is told where rows begin, and slower where a mask says so, as on CPUs.",
    )


class EvaluationSection(Section):
    every: int = Field(4, ge=0, description="Iterations between held-out evaluations; 0: only before and after.")
    tasks: Positive = Field(256, description="Held-out tasks of one evaluation; the same ones each time.")
    samples: Positive = Field(1, description="Episodes on each of them: pass@k is known up to this k.")
    temperature: NonNegative = Field(1.0, description="Sampling temperature of evaluations; 0: greedy.")

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"evaluation.samples must be 1 when evaluation.temperature is 0, for all would be the same, "
                f"got {self.samples}. Raise the temperature."
            )
        return self


class CheckpointSection(Section):
    every: Positive = Field(5, description="Iterations between full checkpoints (weights, optimizer, random states).")
    keep: Positive = Field(2, description="Full checkpoints kept.")
    keep_policies: Positive | Literal["all", "none"] = Field(
        "none",
        description="Policy snapshots (weights only) kept, one per publish; needed to verify stored log-probs.",
    )


class MetricsSection(Section):
    sinks: tuple[str, ...] = Field(
        (),
        description="Besides the database and metrics.jsonl: tensorboard, wandb, or `path/to/file.py:ClassName` of "
        "your own; see docs/data.md.",
    )


class RunConfig(Section):
    """One run, whole."""

    algorithm: Literal[
        "grpo", "rloo", "reinforce", "reinforce++", "reinforce++_baseline", "dr_grpo", "opo", "remax", "ppo"
    ] = Field(
        "grpo",
        description="What gives advantages: a critic (ppo), or rewards beside rewards; see docs/algorithms.md.",
    )
    run: RunSection = Field(default_factory=RunSection, description="Name, folder, seed and length of the run.")
    model: ModelSection = Field(default_factory=ModelSection, description="The policy.")
    lora: LoraSection = Field(default_factory=LoraSection, description="Adapters on the policy.")
    tiny: TinyModelSection = Field(
        default_factory=TinyModelSection, description="The built-in model, used when model.path is null."
    )
    warm_up: WarmUpSection = Field(default_factory=WarmUpSection, description="Supervised start of the built-in model.")
    environment: EnvironmentSection = Field(default_factory=EnvironmentSection, description="Where the agent acts.")
    tasks: TasksSection = Field(
        default_factory=TasksSection, description="A data set as tasks, and the order of a pool of tasks."
    )
    context: ContextSection = Field(default_factory=ContextSection, description="What the policy sees.")
    rollout: RolloutSection = Field(default_factory=RolloutSection, description="How episodes are run.")
    batch: BatchSection = Field(default_factory=BatchSection, description="What one iteration learns from.")
    compute: ComputeSection = Field(
        default_factory=ComputeSection, description="How numbers are made; see docs/speed.md."
    )
    replay: ReplayConfig = Field(default_factory=ReplayConfig, description="The mixing ratio and how rows are drawn.")
    reward: RewardSection = Field(default_factory=RewardSection, description="What an episode is worth.")
    advantage: AdvantageSection = Field(
        default_factory=AdvantageSection, description="What a trajectory is worth beside others."
    )
    loss: LossSection = Field(default_factory=LossSection, description="The heterogeneous on/off-policy loss.")
    kl: KlSection = Field(default_factory=KlSection, description="Distance to a reference policy.")
    critic: CriticSection = Field(default_factory=CriticSection, description="What an action is worth (PPO).")
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection, description="What moves the policy.")
    sft: SftSection = Field(default_factory=SftSection, description="Supervised training on demonstrations of yours.")
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection, description="Held-out success.")
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection, description="What survives a crash.")
    metrics: MetricsSection = Field(default_factory=MetricsSection, description="Where numbers go.")

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if self.replay.weight != 1.0 and self.loss.normalise != "per_stream":
            raise ValueError(
                f"replay.weight must be 1 when loss.normalise is joint, got {self.replay.weight}. "
                "Set loss.normalise: per_stream."
            )
        check_tasks(self.tasks, self.environment.task_pool)
        check_compute(self)
        self.replay.check(self.batch, self.tasks, self.environment, self.run.iterations)
        check_learning(self)
        self.lora.check()
        check_advantages(self)
        self._log_probs_are_there()
        if self.batch.group_size > self.batch.trajectories:
            raise ValueError(
                f"batch.group_size must be at most batch.trajectories ({self.batch.trajectories}), "
                f"got {self.batch.group_size}."
            )
        if self.batch.mini_batch < self.batch.group_size:
            raise ValueError(
                f"batch.mini_batch must be at least batch.group_size ({self.batch.group_size}), for groups stay whole, "
                f"got {self.batch.mini_batch}."
            )
        return self

    def _log_probs_are_there(self) -> None:
        """Where tokens come without behavior log-probs, nothing may need them."""
        speakers = [author for author in self.context.authors if author.action]
        trained = next((author.name for author in speakers if author.trained), None)
        hinted = "context.strategy is hint" if self.context.strategy == "hint" else None
        why = hinted or (f"context.authors has a trained author, {trained!r}" if trained else None)
        for name, section in (("fresh", self.loss.fresh), ("replay", self.loss.replay)):
            needed = name == "fresh" or self.mix_rule().highest_fraction > 0
            if why and needed and section.needs_behavior and section.missing_log_probs == "reject":
                key, right = ("anchor", "old") if section.anchor == "behavior" else ("correction.kind", "none")
                got = section.anchor if key == "anchor" else section.correction.kind
                raise ValueError(
                    f"loss.{name}.{key} must be {right} when {why}, whose log-probs count as missing, got {got}. "
                    f"Set loss.{name}.{key}: {right}, or loss.{name}.missing_log_probs."
                )
        why = hinted or (f"context.authors has an action author, {speakers[0].name!r}" if speakers else None)
        if why and self.kl.reward_coef > 0 and self.algorithm != "ppo":
            raise ValueError(
                f"kl.reward_coef must be 0 when {why}, whose log-probs count as missing, "
                f"got {self.kl.reward_coef}. Use kl.loss_coef."
            )

    def mix_rule(self) -> MixRule:
        return self.replay.mix_rule(self.batch, self.run.iterations)

    def replay_trains(self) -> bool:
        """Whether replayed rows ever take part in an update."""
        return self.replay.mode == "train" and self.mix_rule().highest_fraction > 0

    def replay_fraction(self, iteration: int) -> float:
        """The configured share at 1-based `iteration`, along its schedule."""
        return self.mix_rule().fraction_at(iteration)
