"""What the configuration says about acting: its environment, its episodes and its evaluations."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from replay.config import TaskPool
from replay.setting_types import NonNegative, Positive, PositiveFloat, Section


class EnvironmentSection(TaskPool, Section):
    name: str = Field(
        "lookup_chain",
        description="Built-in environment, or `path/to/file.py:ClassName` for one of your own.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the environment.")


class RolloutSection(Section):
    engine: Literal["local", "vllm"] = Field(
        "local", description="What samples: the policy in this process, or vLLM servers at engine.urls."
    )
    max_turns: Positive = Field(9, description="Most replies of the policy in one episode.")
    max_tokens_per_turn: Positive = Field(40, description="Most tokens of one reply.")
    parallel: Positive = Field(256, description="Most episodes run at once; bounds the memory of the key-value cache.")
    success_reward: float = Field(1.0, description="An episode is a success from this reward on.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature; stored with the log-probs.")
    tool_timeout_s: PositiveFloat = Field(10.0, description="Seconds a tool call may take.")
    tool_output_chars: Positive = Field(20_000, description="Longest tool result shown to the policy, in characters.")
    dynamic_sampling_rounds: int = Field(
        0,
        ge=0,
        description="Most rounds in which groups of equal rewards are replaced by groups of further tasks (dynamic "
        "sampling); 0: they stay.",
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
