"""What a run can be told. Every key with its meaning, its default and its rule; unknown keys are errors.

Reading a file (line numbers, nearest keys, overrides) is `config_file`'s job; this module only says what is valid.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from agentloop.config.mixing import EssSection, ScheduleSection, StartSection, check_mixing, mix_rule
from agentloop.config.sampling import SamplingSection
from agentloop.config.section import Fraction, NonNegative, Positive, Section
from agentloop.config.sections.advantage import AdvantageSection, check_advantages
from agentloop.config.sections.context import ContextSection
from agentloop.config.sections.dataset import TasksSection, check_tasks
from agentloop.config.sections.loss import LossSection
from agentloop.config.sections.model import ComputeSection, LoraSection, ModelSection, TinyModelSection, check_compute
from agentloop.config.sections.optimization import (
    BatchSection,
    CriticSection,
    KlSection,
    OptimizerSection,
    check_learning,
)
from agentloop.config.sections.reward import RewardSection
from agentloop.config.sections.rollout import EnvironmentSection, EvaluationSection, RolloutSection
from agentloop.config.sections.run_section import CheckpointSection, MetricsSection, RunSection
from agentloop.config.sections.supervised_learning import SftSection, WarmUpSection
from replay.mixing.rule import MixRule
from replay.mixing.schedule import progress_at
from replay.records import SOURCE_NAME


class CapacitySection(Section):
    """What a run keeps of the rows it collected; over a limit the oldest lose their content."""

    rows: Positive | None = Field(None, description="Most rows.")
    bytes: Positive | None = Field(None, description="Most bytes of their tokens and messages, compressed.")
    age: Positive | None = Field(None, description="Most iterations since a row was collected.")
    staleness: Positive | None = Field(None, description="Most publishes since a row's oldest token was sampled.")
    per_task: Positive | None = Field(None, description="Most rows of one task.")


def _check_url(where: str, url: str) -> None:
    from replay.errors import DatabaseRefused
    from replay.storage.databases.open import check_url  # here: SQLAlchemy is slow to start, and most runs name none

    try:
        check_url(url)
    except DatabaseRefused as error:
        raise ValueError(f"{where}.{error}") from None


class ReplaySection(SamplingSection):
    database: str | None = Field(
        None,
        description="Where experience is kept: postgresql+psycopg://USER@HOST/NAME; null: a file in the run folder.",
    )
    fraction: Fraction = Field(0.0, description="Share of the batch's trajectories drawn from the buffer.")
    schedule: ScheduleSection = Field(
        default_factory=ScheduleSection, description="How the fraction runs over the run."
    )
    start: StartSection = Field(
        default_factory=StartSection, description="No replay before all of this holds; from then on it is not asked."
    )
    controller: Literal["none", "ess"] = Field(
        "none", description="ess: less replay while an age bucket of it has too low an effective sample size."
    )
    ess: EssSection = Field(default_factory=EssSection, description="How the controller `ess` acts.")
    mode: Literal["train", "observe"] = Field(
        "train",
        description="train: replayed tokens carry loss; observe: they come on top and are only measured.",
    )
    unit: Literal["any", "trajectory", "task", "group"] = Field(
        "any",
        description="any: single trajectories; trajectory: members of every group, of its task; task: of some groups; "
        "group: whole stored groups; see docs/mixing.md.",
    )
    task_members: Positive | None = Field(None, description="Replayed members of a mixed group (unit task).")
    sources: dict[str, Fraction] = Field(
        default_factory=dict,
        description="Shares of the replayed rows by source, or by the id of another run, summing to 1, e.g. {self: "
        "0.7, teacher: 0.3}; {}: as the sampler takes the run's own and imported ones.",
    )
    attach: dict[str, str] = Field(
        default_factory=dict,
        description="Other buffers to draw from, by the source their rows get, e.g. {wins: runs/quickstart-001}: run "
        "folder, file or URL. Copied when the run begins.",
    )
    shortfall: Literal["fresh", "shrink", "error"] = Field(
        "fresh",
        description="What the buffer can't give: fresh, is collected; shrink, is left out; error, the run stops.",
    )
    complete_zero_variance: bool = Field(
        False,
        description="A fresh group of equal rewards is given a stored member of its task with another reward, out of "
        "the replayed part.",
    )
    baseline: Literal["stored", "shared", "split", "fresh_only", "leave_one_out"] = Field(
        "stored",
        description="Advantage of a replayed row: stored, of the group it was born in; else against members of its "
        "task in the batch: all (shared), replayed (split), fresh (fresh_only), all but itself (leave_one_out).",
    )
    negative_weight: Fraction = Field(
        1.0,
        description="What the loss of a replayed row with a negative advantage is multiplied by (credit turn: the "
        "negative advantages of its tokens); 0: they teach nothing.",
    )
    capacity: CapacitySection = Field(
        default_factory=CapacitySection,
        description="What the buffer has room for; null everywhere: it keeps everything. See docs/replay-commands.md.",
    )
    max_quarantined: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of the run's rows found corrupt above which it stops; the first three never stop it.",
    )
    dedupe: bool = Field(
        False,
        description="Store a row without its tokens where an eligible one of its task has the same tokens; its group "
        "is then not drawn whole.",
    )
    redact: str | None = Field(
        None,
        description="`path/to/file.py:function` that is given a trajectory's messages and returns those to store; a "
        "row whose messages it changes is stored without its tokens.",
    )
    weight: NonNegative = Field(
        1.0, description="Weight of the replay stream's loss; needs `loss.normalise: per_stream` unless 1."
    )

    @model_validator(mode="after")
    def _database_can_be_named(self) -> Self:
        if self.database is not None:
            _check_url("replay", self.database)
        for name, place in self.attach.items():
            if not SOURCE_NAME.fullmatch(name) or name in ("self", "gateway"):
                raise ValueError(
                    f"replay.attach must name sources in {SOURCE_NAME.pattern}, not self or gateway, got {name!r}. "
                    "Choose another name."
                )
            if "://" in place:
                _check_url(f"replay.attach.{name}", place)
        return self


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
    replay: ReplaySection = Field(default_factory=ReplaySection, description="The mixing ratio and how rows are drawn.")
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
        check_mixing(self)
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
            needed = name == "fresh" or self.mix_rule().fraction.highest > 0
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
        return mix_rule(self)

    def replay_trains(self) -> bool:
        """Whether replayed rows ever take part in an update."""
        return self.replay.mode == "train" and self.mix_rule().fraction.highest > 0

    def replay_fraction(self, iteration: int) -> float:
        """The configured share at 1-based `iteration`, along its schedule."""
        return self.mix_rule().fraction.at(iteration, progress_at(iteration, self.run.iterations))
