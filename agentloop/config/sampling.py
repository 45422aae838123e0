"""What a run can be told about which stored rows are drawn."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from agentloop.config.section import Fraction, Positive, Section
from context.wording import suggest
from replay.sampling.compatibility import MISMATCHES
from replay.sampling.samplers import SAMPLERS, make_sampler


class SamplingSection(Section):
    """Keys of `replay`: who is drawn, and who never is."""

    sampler: str = Field(
        "success",
        description="Which rows are drawn: uniform, recency, fifo_window, success, difficulty, entropy, advantage, "
        "reward, max_variance_group, freshness, or `path/to/file.py:ClassName` of your own; see docs/replay.md.",
    )
    sampler_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the sampler, for example {half_life: 4}."
    )
    successful_only: bool = Field(True, description="Draw successful trajectories only.")
    max_staleness: int | None = Field(
        None, ge=0, description="Oldest rows drawn, in policy versions; null: however old."
    )
    unknown_staleness: Literal["allow", "refuse"] = Field(
        "allow", description="Rows of other runs, whose staleness nobody knows: drawn, or never."
    )
    max_uses: Positive | None = Field(
        None, description="How often one row is drawn, over all runs of the database; null: any number of times."
    )
    cooldown: int = Field(0, ge=0, description="Iterations a row rests after it was drawn.")
    per_task: Positive | None = Field(None, description="Most rows of one task in one batch; null: any number.")
    per_group: Positive | None = Field(None, description="Most rows of one group in one batch; null: any number.")
    retire_solved: Fraction | None = Field(
        None,
        description="A task's rows rest while its newest group has at least this success rate; null: never.",
    )
    allow_mismatch: tuple[str, ...] = Field(
        (),
        description="Differences to this run that don't keep a row from being drawn, of: tokenizer, template, "
        "model_family, vocab_size, logprobs_mode, top_p, top_k.",
    )

    @model_validator(mode="after")
    def _rows_can_be_drawn(self) -> Self:
        if ":" not in self.sampler and self.sampler not in SAMPLERS:
            raise ValueError(
                f"replay.sampler must be a built-in sampler or path/to/file.py:ClassName, got {self.sampler!r}. "
                f"{suggest(self.sampler, SAMPLERS)}"
            )
        if self.sampler in SAMPLERS:
            make_sampler(self.sampler, 0, self.sampler_options)
        for name in self.allow_mismatch:
            if name not in MISMATCHES:
                raise ValueError(
                    f"replay.allow_mismatch must name what may differ, got {name!r}. {suggest(name, MISMATCHES)}"
                )
        return self
