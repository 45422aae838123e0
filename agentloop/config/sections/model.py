"""The sections `model`, `lora`, `tiny` and `compute`: the policy's weights, and how it is computed."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from agentloop.errors import UserError
from replay.locate import best_policy, newest_model, split_best
from replay.setting_types import Positive, PositiveFloat, Section


class ComputeSection(Section):
    autocast: Literal["auto", "none", "bfloat16"] = Field(
        "auto",
        description="bfloat16: sampling, scoring and gradients multiply in bfloat16, the weights stay float32; auto: "
        "bfloat16 for float32 weights on a GPU that supports it, elsewhere none; --resume keeps what auto was.",
    )
    gradient_checkpointing: Literal["auto"] | bool = Field(
        "auto",
        description="Backward computes the activations of each layer again, which saves memory and takes one more "
        "forward; auto: on a GPU where the activations would not fit, elsewhere never.",
    )
    old_log_probs: Literal["auto", "recompute"] = Field(
        "auto",
        description="auto: rows that the current policy has just sampled keep their stored log-probs, where sampling "
        "and scoring agree within 0.001 nats; recompute: one more pass scores all rows.",
    )
    rank_timeout_s: PositiveFloat = Field(600.0, description="Seconds to wait for a silent rank in an update.")


LayerNames = Annotated[tuple[str, ...], Field(min_length=1)]


class LoraSection(Section):
    """LoRA (Hu et al. 2021, arXiv 2106.09685) trains two thin matrices next to each layer's own."""

    rank: int = Field(0, ge=0, description="Rank of the adapters, which alone are trained; 0: the whole model is.")
    alpha: Positive = Field(32, description="An adapter's output is scaled by alpha / rank.")
    target_modules: Literal["auto"] | LayerNames = Field(
        "auto",
        description="Names of the layers with adapters, e.g. [q_proj, v_proj]; auto: all linear ones but the head.",
    )


class ModelSection(Section):
    path: str | None = Field(None, description="Causal LM of Hugging Face: folder, id, RUN:best; null: a built-in one.")
    revision: str | None = Field(None, description="Commit of a hub model.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Its device; auto: cuda if there is one.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Type of the weights.")
    trust_remote_code: bool = Field(False, description="Run code that comes with the model. Off unless written here.")

    @field_validator("path")
    @classmethod
    def _find_best(cls, given: str | None) -> str | None:
        """Replace RUN:best by the folder of the run's best policy, so that the configuration names the policy."""
        run, best = split_best(given or "")
        if not best and (run / "run.json").exists():
            named = newest_model(run) or "another: it has no weights yet"
            raise UserError(f"model.path must be a model, got {given!r}, a run's folder. Name {named}.")
        return str(best_policy(run)) if best else given


class TinyModelSection(Section):
    """The model built from a seed when `model.path` is null."""

    layers: Positive = Field(2, description="Decoder layers.")
    hidden: Positive = Field(128, description="Width of the residual stream.")
    vocabulary: int = Field(560, ge=300, description="Size of the byte-level BPE vocabulary.")


MODEL_DEFAULTS: Mapping[tuple[str, ...], Any] = {
    ("run", "iterations"): 200,
    ("context", "max_tokens"): 4096,
    ("rollout", "max_turns"): 12,
    ("rollout", "max_tokens_per_turn"): 512,
    ("rollout", "parallel"): 64,
    ("batch", "trajectories"): 64,
    ("batch", "mini_batch"): 32,
    ("batch", "micro_batch_tokens"): 8192,
    ("critic", "optimizer", "learning_rate"): 1e-5,
    ("optimizer", "learning_rate"): 1e-6,
    ("optimizer", "warmup_iterations"): 5,
    ("optimizer", "schedule"): "linear",
    ("sft", "learning_rate"): 1e-5,
    ("evaluation", "every"): 10,
    ("evaluation", "tasks"): 64,
    ("checkpoint", "every"): 10,
}
"""Defaults where `model.path` names a model, which differ from those of the built-in one."""
