"""The configuration of a run: every key with its meaning, its default and its rule; unknown keys are errors."""

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from agentloop.algorithms.catalog import ALGORITHMS
from agentloop.config.conflicts import check_conflicts
from agentloop.config.sections.advantage import AdvantageSection, check_advantages
from agentloop.config.sections.context import ContextSection
from agentloop.config.sections.environments import (
    EnvironmentPart,
    EnvironmentSection,
    EnvironmentShare,
    Name,
    TasksSection,
    check_environments,
)
from agentloop.config.sections.loss import LossSection
from agentloop.config.sections.model import ComputeSection, LoraSection, ModelSection, TinyModelSection
from agentloop.config.sections.optimization import (
    BatchSection,
    CriticSection,
    KlSection,
    OptimizerSection,
    check_learning,
)
from agentloop.config.sections.reward import RewardSection
from agentloop.config.sections.rollout import (
    CollectionSection,
    EngineSection,
    EvaluationSection,
    GatewaySection,
    RolloutSection,
    check_collection,
    check_engine,
)
from agentloop.config.sections.run_section import (
    CheckpointSection,
    MetricsSection,
    RunSection,
    SftSection,
    WarmUpSection,
)
from replay.config import ReplayConfig
from replay.mixing.mix_settings import MixRule
from replay.setting_types import Section

if TYPE_CHECKING:
    AlgorithmName = str
else:
    AlgorithmName = Literal[tuple(ALGORITHMS)]


class RunConfig(Section):
    """One run, whole."""

    algorithm: AlgorithmName = Field("grpo", description="Algorithm that computes advantages; see docs/algorithms.md.")
    run: RunSection = Field(default_factory=RunSection, description="Name, folder, seed and length of the run.")
    model: ModelSection = Field(default_factory=ModelSection, description="The policy.")
    lora: LoraSection = Field(default_factory=LoraSection, description="Adapters on the policy.")
    tiny: TinyModelSection = Field(default_factory=TinyModelSection, description="The built-in model.")
    warm_up: WarmUpSection = Field(default_factory=WarmUpSection, description="Supervised start of the built-in model.")
    environment: EnvironmentSection = Field(default_factory=EnvironmentSection, description="Where the agent acts.")
    environments: dict[Name, EnvironmentShare] = Field(
        default_factory=dict,
        description="Several environments instead of one, by names of yours. Each has its share of the episodes, the "
        "keys of environment, and its own tasks; for example {easy: {share: 0.7, options: {hops: [1, 2]}}, hard: "
        "{share: 0.3, options: {hops: [3, 4]}}}. See docs/environments.md.",
    )
    tasks: TasksSection = Field(default_factory=TasksSection, description="A data set as tasks, and their order.")
    context: ContextSection = Field(default_factory=ContextSection, description="What the policy sees.")
    rollout: RolloutSection = Field(default_factory=RolloutSection, description="How episodes are run.")
    engine: EngineSection = Field(default_factory=EngineSection, description="Servers that sample (engine vllm).")
    gateway: GatewaySection = Field(default_factory=GatewaySection, description="URL at which agents ask the policy.")
    collection: CollectionSection = Field(default_factory=CollectionSection, description="Who collects, how far ahead.")
    batch: BatchSection = Field(default_factory=BatchSection, description="The rows of one iteration.")
    compute: ComputeSection = Field(default_factory=ComputeSection, description="Speed; see docs/scaling.md.")
    replay: ReplayConfig = Field(default_factory=ReplayConfig, description="The mixing ratio and how rows are drawn.")
    reward: RewardSection = Field(default_factory=RewardSection, description="Rewards of an episode.")
    advantage: AdvantageSection = Field(default_factory=AdvantageSection, description="Advantages of trajectories.")
    loss: LossSection = Field(default_factory=LossSection, description="The heterogeneous on/off-policy loss.")
    kl: KlSection = Field(default_factory=KlSection, description="KL divergence from a reference policy.")
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection, description="The policy's optimizer.")
    critic: CriticSection = Field(default_factory=CriticSection, description="Values of states (PPO).")
    sft: SftSection = Field(default_factory=SftSection, description="Supervised training on demonstrations of yours.")
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection, description="Held-out success.")
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection, description="What is kept to resume from.")
    metrics: MetricsSection = Field(default_factory=MetricsSection, description="Where metrics are logged.")

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        check_environments(self, check_conflicts, check_collection, check_advantages)
        check_engine(self)
        check_learning(self)
        self._log_probs_are_there()
        size, rows = self.batch.group_size, self.batch.trajectories
        if size > rows:
            raise ValueError(f"batch.group_size must be at most batch.trajectories ({rows}), got {size}.")
        if size == 1 and ALGORITHMS[self.algorithm].skips_equal_groups and self.replay.baseline == "stored":
            raise ValueError(
                f"batch.group_size must be above 1 when algorithm is {self.algorithm}, by which members of a group are "
                "compared, got 1: no fresh row would teach anything. Use reinforce or ppo, or larger groups."
            )
        if self.batch.mini_batch < size:
            raise ValueError(
                f"batch.mini_batch must be at least batch.group_size ({size}), for groups stay whole, "
                f"got {self.batch.mini_batch}."
            )
        return self

    def _log_probs_are_there(self) -> None:
        """Raises ValueError where tokens have no behavior log-probs and the loss or the KL needs them."""
        speakers = [author for author in self.context.authors if author.action]
        trained = next((author.name for author in speakers if author.trained), None)
        hinted = "context.strategy is hint" if self.context.strategy == "hint" else None
        why = hinted or (f"context.authors has a trained author, {trained!r}" if trained else None)
        for name, section in self.loss.parts().items():
            needed = name != "replay" or self.mix_rule().highest_fraction > 0
            if why and needed and section.rejects_missing:
                key, right = ("anchor", "old") if section.anchor == "behavior" else ("correction.kind", "none")
                got = section.anchor if key == "anchor" else section.correction.kind
                raise ValueError(
                    f"loss.{name}.{key} must be {right} when {why}, whose log-probs count as missing, got {got}. "
                    f"Set loss.{name}.{key}: {right}, or loss.{name}.missing_log_probs."
                )
        why = hinted or (f"context.authors has an action author, {speakers[0].name!r}" if speakers else None)
        if why and self.kl.reward_coef > 0 and not ALGORITHMS[self.algorithm].needs_critic:
            raise ValueError(
                f"kl.reward_coef must be 0 when {why}, whose log-probs count as missing, "
                f"got {self.kl.reward_coef}. Use kl.loss_coef."
            )

    @property
    def parts(self) -> tuple[EnvironmentPart, ...]:
        """The run's environments; most runs have one."""
        if not self.environments:
            return (EnvironmentPart(None, 1.0, self.environment, self.tasks),)
        return tuple(EnvironmentPart(name, part.share, part, part.tasks) for name, part in self.environments.items())

    def mix_rule(self) -> MixRule:
        return self.replay.mix_rule(self.batch, self.run.schedule_length)

    def replay_trains(self) -> bool:
        """Whether replayed rows ever take part in an update."""
        return self.replay.mode == "train" and self.mix_rule().highest_fraction > 0
