"""Every configuration key with its rule, default and meaning, read off `RunConfig` itself."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from agentloop.config import RunConfig
from agentloop.config.sections.model import MODEL_DEFAULTS
from replay.setting_types import rule_in_words

_NAMES_ELSEWHERE = {
    "run.iterations": "epochs num_epochs num_train_epochs total_epochs run.steps max_steps total_training_steps",
    "lora.rank": "peft_config lora_rank lora_r",
    "tasks.data": "dataset train_dataset train_files",
    "context.max_tokens": "max_length max_seq_length max_model_len max_prompt_length",
    "compute.autocast": "bf16 fp16 mixed_precision",
    "rollout.engine": "use_vllm",
    "rollout.max_tokens_per_turn": "max_completion_length max_new_tokens max_response_length response_length",
    "engine.serve": "vllm_mode",
    "batch.trajectories": "batch_size batch.size train_batch_size generation_batch_size",
    "batch.group_size": "num_generations rollout.n",
    "batch.mini_batch": "gradient_accumulation_steps ppo_mini_batch_size mini_batch_size",
    "batch.ppo_epochs": "num_iterations",
    "batch.micro_batch_tokens": "per_device_train_batch_size micro_batch_size ppo_micro_batch_size_per_gpu",
    "reward.functions": "reward_funcs reward_weights custom_reward_function",
    "algorithm": "scale_rewards norm_adv_by_std_in_grpo",
    "loss.aggregation": "loss_type loss_agg_mode",
    "loss.fresh.objective": "epsilon epsilon_high clip_range clip_ratio clip_ratio_high clip_low clip_high",
    "kl.loss_coef": "beta kl_beta kl_coef kl_loss_coef",
    "optimizer.learning_rate": "lr",
    "evaluation.every": "eval_steps eval_strategy test_freq",
    "checkpoint.every": "save_steps save_strategy save_freq",
    "metrics.sinks": "report_to logger callbacks wandb",
}
KEY_OF_NAME_ELSEWHERE = {name: key for key, names in _NAMES_ELSEWHERE.items() for name in names.split()}
"""Keys by what other libraries call them, of which spelling tells nothing."""


@dataclass(frozen=True)
class Key:
    """One leaf of the configuration."""

    path: tuple[str, ...]
    rule: str
    """The rule for a value, as the end of a sentence with "must be": `a number from 0 to 1`."""
    default: Any
    """Default with the built-in model."""
    model_default: Any
    """Default where model.path names a model."""
    meaning: str
    free: bool
    """Whether the value is a mapping with keys of the user's, such as an environment's options."""
    kinds: tuple[Mapping[str, Any], ...] = ()
    """The kinds of value that it may have, each with its defaults; the first key names the kind."""

    def default_with(self, model_path: str | None) -> Any:
        return self.default if model_path is None else self.model_default

    @property
    def dotted(self) -> str:
        return ".".join(self.path)


@cache
def schema_entries() -> dict[tuple[str, ...], Key | str]:
    """Keys, and the meanings of sections, by path, in the order of the file; a section comes before its keys."""
    schema = RunConfig.model_json_schema()
    defaults = RunConfig().model_dump(mode="json")
    return dict(_entries(schema, schema["$defs"], defaults, ()))


def value_at(values: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = values
    for name in path:
        value = value[name]
    return value


def _entries(
    schema: dict[str, Any], definitions: dict[str, Any], defaults: dict[str, Any], above: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Key | str]]:
    for name, part in schema["properties"].items():
        path = (*above, name)
        if "$ref" in part:
            section = definitions[part["$ref"].rsplit("/", 1)[1]]
            yield path, part.get("description") or section.get("description", "")
            yield from _entries(section, definitions, defaults[name], path)
        else:
            kinds = tuple(_kinds(part.get("oneOf", ()), definitions))
            free = bool(kinds) or part.get("type") == "object" or any("$ref" in each for each in part.get("anyOf", ()))
            names = ", ".join(str(next(iter(kind.values()))) for kind in kinds)
            rule = f"one of {names}, alone or with options" if kinds else rule_in_words(part)
            model_default = MODEL_DEFAULTS.get(path, defaults[name])
            yield path, Key(path, rule, defaults[name], model_default, part.get("description", ""), free, kinds)


def _kinds(parts: Iterable[Mapping[str, Any]], definitions: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for part in parts:
        if "oneOf" in part:
            yield from _kinds(part["oneOf"], definitions)
            continue
        (tag, names), *options = definitions[part["$ref"].rsplit("/", 1)[1]]["properties"].items()
        for name in names.get("enum", [names.get("const", "path/to/file.py:function")]):
            yield {tag: name} | {key: option.get("default", {}) for key, option in options}
