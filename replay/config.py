"""The part of a run's configuration that decides about its buffer: all of `replay`, and a few other keys."""

from typing import Any, Literal, NoReturn, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from context.wording import suggest
from replay.errors import DatabaseRefused, ReplayError, sentence_for_validation_error
from replay.mixing.mix_settings import SAME_TASK, MixRule, MixSection
from replay.mixing.request import Limits, LimitSection
from replay.records import HINDSIGHT, OWN_SOURCES, SOURCE_NAME, RunRecord
from replay.sampling.compatibility import MISMATCHES
from replay.sampling.samplers import SAMPLERS, EntropySampler, make_sampler
from replay.setting_types import Fraction, NonNegative, Positive, PositiveFloat, Section
from replay.storage.databases import check_url
from replay.storage.retention import Capacity


class _RunSection(Section):
    """A section of which only a few keys matter here; its other keys are ignored."""

    model_config = ConfigDict(extra="ignore")


class RunLength(_RunSection):
    iterations: Positive = Field(60, description="Most iterations (collect .. publish) the run makes.")
    schedule_iterations: Positive | None = Field(
        None,
        description="Length, in iterations, of the schedules of learning rates and of replay, which keep their last "
        "value after it; null: the length of the run. A run that is lengthened keeps the length it began with.",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of everything that is random.")

    @property
    def schedule_length(self) -> int:
        return self.schedule_iterations or self.iterations


class BatchSize(_RunSection):
    trajectories: Positive = Field(
        128, description="Trajectories of one iteration's batch, fresh and replayed together."
    )
    group_size: Positive = Field(8, description="Fresh trajectories per task.")


class ContextLength(_RunSection):
    max_tokens: Positive = Field(512, description="Longest training sequence, prompt and replies, in tokens.")


class TaskPool(_RunSection):
    task_pool: Positive | Literal["unlimited"] = Field(
        "unlimited", description="Number of different training tasks; unlimited: every task is new."
    )


class TaskData(_RunSection):
    data: str | None = Field(
        None,
        description="Rows to make tasks of: a .jsonl (also .jsonl.gz) or .parquet file, `{split}` in its "
        "path standing for the split, or hf:NAME for a Hugging Face data set, a hub id or a folder; null: the "
        "environment makes tasks up.",
    )


class HindsightSection(Section):
    """Hindsight stores a failed episode a second time, as a success of the task that it did solve."""

    enable: bool = Field(
        False,
        description="Ask the environment's `achieved` which task a failed episode solved. The rows have source "
        "`hindsight`.",
    )
    min_turns: Positive = Field(3, description="Fewest replies of a hindsight row, including its answer.")
    advantage: PositiveFloat = Field(1.0, description="Advantage of every hindsight row, which has no group.")
    window: Positive | None = Field(
        8, description="A row is drawn for at most this many iterations after its own; null: for ever."
    )


class ReplayConfig(LimitSection, MixSection):
    """The settings of replay: the mixing ratio, which rows are drawn, and what the buffer keeps."""

    sampler: str = Field(
        "success",
        description="Which rows are drawn: uniform, recency, fifo_window, success, difficulty, entropy, advantage, "
        "reward, max_variance_group, freshness, or `path/to/file.py:ClassName` of your own; see docs/mixing.md.",
    )
    sampler_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the sampler, for example {half_life: 4}."
    )
    baseline: Literal["stored", "shared", "split", "fresh_only"] = Field(
        "stored",
        description="Advantage of a replayed row. stored: from its own group. Others compare it with rows of its "
        "task in the batch: all (shared), replayed (split), fresh (fresh_only).",
    )
    hindsight: HindsightSection = Field(
        default_factory=HindsightSection, description="Rows of what failed episodes did solve; see docs/mixing.md."
    )
    weight: NonNegative = Field(
        1.0, description="Weight of the replay stream's loss; needs `loss.normalise: per_stream` unless 1."
    )
    database: str | None = Field(
        None,
        description="Database of the buffer: postgresql+psycopg://USER@HOST/NAME; null: a file in the run folder.",
    )
    attach: dict[str, str] = Field(
        default_factory=dict,
        description="Other buffers to draw from, by the source that their rows get, e.g. {wins: runs/quickstart-001}: "
        "a run folder, database file or URL; or a file of rows or conversations, e.g. {teacher: teacher.jsonl}. Their "
        "rows are copied when the run begins.",
    )
    capacity: Capacity = Field(
        default_factory=Capacity,
        description="Limits of the buffer; null everywhere: it keeps everything. See docs/replay.md.",
    )
    max_quarantined: Fraction = Field(
        0.01, description="The run stops above this share of corrupt rows; the first three never stop it."
    )
    redact: str | None = Field(
        None,
        description="`path/to/file.py:function` that takes a trajectory's messages and returns the messages to store; "
        "a row whose messages it changes is stored without its tokens.",
    )

    @property
    def limits(self) -> Limits:
        window = self.hindsight.window if self.hindsight.enable else None
        return Limits(**self.values_of(LimitSection), sources=tuple(self.sources) or None, hindsight_window=window)

    def mix_rule(self, batch: BatchSize, iterations: int) -> MixRule:
        """The rule that composes batches, in a run whose schedules last `iterations` iterations."""
        sizes = {"trajectories": batch.trajectories, "group_size": batch.group_size, "iterations": iterations}
        return MixRule(**self.values_of(MixSection), **sizes)

    def check(self, batch: BatchSize, tasks: TaskData, environment: TaskPool, iterations: int) -> None:
        """Raises ValueError if batches of this size can't be mixed by these settings."""
        size, unit = batch.group_size, f"when replay.unit is {self.unit}"
        if self.unit != "any" and batch.trajectories % size:
            rule = f"be a multiple of batch.group_size ({size}) {unit}"
            _refuse("batch.trajectories", rule, batch.trajectories, "Change one of them, or set replay.unit: any.")
        if self.unit in SAME_TASK:
            check_task_pool(tasks, environment, f"replay.unit is {self.unit}")
        for name in ("per_task", "per_group") if self.unit == "group" else ():
            most = getattr(self, name)
            if most is not None and most < size:
                rule = f"be at least batch.group_size ({size}) {unit}, whose groups are drawn whole"
                _refuse(f"replay.{name}", rule, most, "Raise it, or leave it out.")
        if self.unit == "task":
            members, highest = self.task_members, self.mix_rule(batch, iterations).highest_fraction
            if members is None or members > size:
                rule = f"be a number from 1 to batch.group_size ({size}) {unit}"
                remedy = "Set how many members of a mixed group are replayed."
                _refuse("replay.task_members", rule, members or "null", remedy)
            if highest * size > members + 1e-9:
                rule = f"be at least replay.fraction x batch.group_size ({highest:g} x {size})"
                why = "With fewer, even a mixed group of every task holds too few replayed rows."
                _refuse("replay.task_members", rule, members, f"{why} Raise it, or lower replay.fraction.")

    @model_validator(mode="after")
    def _rows_can_be_drawn(self) -> Self:
        if ":" not in self.sampler and self.sampler not in SAMPLERS:
            rule, remedy = "be a built-in sampler or path/to/file.py:ClassName", suggest(self.sampler, SAMPLERS)
            _refuse("replay.sampler", rule, f"{self.sampler!r:.80}", remedy)
        sampler = make_sampler(self.sampler, 0, self.sampler_options) if self.sampler in SAMPLERS else None
        if self.unit == "group" and isinstance(sampler, EntropySampler):
            rule = "weigh rows when replay.unit is group"
            _refuse("replay.sampler", rule, f"{self.sampler}, which ranks them", "Use another, or replay.unit: any.")
        for name in self.allow_mismatch:
            if name not in MISMATCHES:
                _refuse("replay.allow_mismatch", "name what may differ", repr(name), suggest(name, MISMATCHES))
        return self

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        shares = self.sources
        if shares and (min(shares.values()) <= 0 or abs(sum(shares.values()) - 1) > 1e-6):
            remedy = "They divide the replayed rows; replay.fraction says how many there are."
            _refuse("replay.sources", "have shares above 0 that sum to 1", shares, remedy)
        if self.unit == "group" and self.successful_only:
            rule = "be false when replay.unit is group, whose members are drawn whole"
            _refuse("replay.successful_only", rule, "true", "Set replay.successful_only: false.")
        if self.unit != "task" and self.task_members is not None:
            rule = f"be left out when replay.unit is {self.unit}"
            _refuse("replay.task_members", rule, self.task_members, "Remove it, or set replay.unit: task.")
        return self

    @model_validator(mode="after")
    def _hindsight_is_drawn(self) -> Self:
        if not self.hindsight.enable:
            if HINDSIGHT in self.sources:
                rule = "be true when replay.sources names hindsight"
                _refuse("replay.hindsight.enable", rule, "false", "Set it, or leave hindsight out of replay.sources.")
            return self
        rules = (
            ("mode", "train", "Hindsight rows were not sampled for their task. Set replay.mode: train."),
            ("unit", "any", "No fresh episode has the task of a hindsight row. Set replay.unit: any."),
            ("baseline", "stored", "No row of a batch compares with a hindsight row. Set replay.baseline: stored."),
        )
        for key, right, why in rules:
            if getattr(self, key) != right:
                rule = f"be {right} when replay.hindsight.enable is true"
                _refuse(f"replay.{key}", rule, getattr(self, key), why)
        if self.schedule.highest_share(self.fraction) == 0 or (self.sources and HINDSIGHT not in self.sources):
            key = "sources" if self.fraction else "fraction"
            rule = "let rows of source hindsight be drawn when replay.hindsight.enable is true"
            remedy = "Set for example replay.fraction: 0.5 and replay.sources: {hindsight: 1.0}."
            _refuse(f"replay.{key}", rule, getattr(self, key), remedy)
        return self

    @model_validator(mode="after")
    def _databases_can_be_named(self) -> Self:
        places = {} if self.database is None else {"replay": self.database}
        for name, place in self.attach.items():
            if not SOURCE_NAME.fullmatch(name) or name in OWN_SOURCES:
                rule = f"name sources in {SOURCE_NAME.pattern}, none of {', '.join(OWN_SOURCES)}"
                _refuse("replay.attach", rule, repr(name), "Choose another name.")
            if "://" in place:
                places[f"replay.attach.{name}"] = place
        for key, url in places.items():
            try:
                check_url(url)
            except DatabaseRefused as error:
                raise ValueError(f"{key}.{error}") from None
        return self


def check_task_pool(tasks: TaskData, environment: TaskPool, when: str) -> None:
    """Raises ValueError if no task is ever repeated."""
    if environment.task_pool == "unlimited" and tasks.data is None:
        why = "Otherwise no task is repeated, and the buffer never holds a row of a new task."
        remedy = f"{why} Set it, for example to 500, or name rows with tasks.data."
        _refuse("environment.task_pool", f"be a number when {when}", "unlimited", remedy)


def _refuse(key: str, rule: str, found: object, remedy: str) -> NoReturn:
    raise ValueError(f"{key} must {rule}, got {found}. {remedy}")


class StoredEnvironment(TaskPool):
    tasks: TaskData = Field(default_factory=TaskData)


class StoredConfig(_RunSection):
    """The part of a run's stored configuration that decides how its batches are composed. A missing key has its
    default."""

    run: RunLength = Field(default_factory=RunLength)
    batch: BatchSize = Field(default_factory=BatchSize)
    context: ContextLength = Field(default_factory=ContextLength)
    environment: TaskPool = Field(default_factory=TaskPool)
    tasks: TaskData = Field(default_factory=TaskData)
    environments: dict[str, StoredEnvironment] = Field(default_factory=dict)
    replay: ReplayConfig = Field(default_factory=ReplayConfig)

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        for pool, tasks in self._parts():
            self.replay.check(self.batch, tasks, pool, self.run.schedule_length)
        return self

    @property
    def task_pool(self) -> int | Literal["unlimited"]:
        """The number of different training tasks in all environments."""
        pools = [pool.task_pool for pool, _ in self._parts()]
        return "unlimited" if "unlimited" in pools else sum(int(pool) for pool in pools)

    @property
    def has_rows(self) -> bool:
        """Whether tasks are rows of data; the configuration does not say how many."""
        return any(tasks.data is not None for _, tasks in self._parts())

    def _parts(self) -> list[tuple[TaskPool, TaskData]]:
        several = [(one, one.tasks) for one in self.environments.values()]
        return list[tuple[TaskPool, TaskData]](several) or [(self.environment, self.tasks)]

    def mix_rule(self) -> MixRule:
        return self.replay.mix_rule(self.batch, self.run.schedule_length)


class WrongSettings(ReplayError):
    """The settings are invalid, or allow no batch."""


def stored_config(run: RunRecord) -> StoredConfig:
    """The stored configuration of a run. Raises WrongSettings if this version would start no run with it: another
    version or program may have written it."""
    try:
        return StoredConfig.model_validate(dict(run.config))
    except ValidationError as error:
        raise WrongSettings(
            f"configuration of run {run.id} must be one of this agentloop, got one that another recorded: "
            f"{sentence_for_validation_error(error):.200} Use the agentloop that recorded it."
        ) from error
