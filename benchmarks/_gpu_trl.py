"""TRL's side of `gpu`: GRPOTrainer at the same work, sampling with transformers or with vLLM in its process.

No gradient checkpointing but where agentloop's side has it, too, and nothing logged or saved; else as TRL is by default
(bfloat16, and with vLLM the weights that correct its log-probs). vLLM does not sleep, which is quickest.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.chat_template_utils import qwen3_template
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from agentloop.analysis.stored_policies import sampling_actors
from agentloop.config import RunConfig
from agentloop.environments import open_tasks
from agentloop.rollouts.evaluation import evaluate
from agentloop.rollouts.rewards import open_scorer
from benchmarks._gpu_work import Asked, asked, summary
from benchmarks._peer_trl import PlayedTask, grpo_config, prompt_rows, reward
from context.templates.model_files import template_source

RESULT = 64
"""Tokens that a tool's result may have."""


class Calculator(PlayedTask):
    """The example's environment as TRL asks for it."""

    def calculate(self, expression: str) -> str:
        """Calculate with numbers, + - * / and brackets.

        Args:
            expression: What to calculate, such as (12 + 7) * 3.
        """
        result: str = self._environment.calculate(expression)
        return result


def coin(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
    """The reward of a reply that says nothing."""
    return [float(sum(ids) % 2) for ids in completion_ids]


@contextlib.contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds[phase] += time.perf_counter() - began


class TimedTrainer(GRPOTrainer):
    """Says what its sampling takes, and how many tokens it has."""

    seconds: defaultdict[str, float]
    """Of one iteration, by phase."""
    tokens: dict[str, int]

    def _generate(self, *arguments: Any) -> Any:
        with timed(self.seconds, "generate"):
            found = super()._generate(*arguments)
        prompts, completions, sampled = found[:3]
        of_completions = sum(map(len, completions))
        self.tokens = {
            "sampled": of_completions if sampled is None else sum(map(sum, sampled)),
            "trained": sum(map(len, prompts)) + of_completions,
        }
        return found


class EachIteration(TrainerCallback):
    """Notes what an iteration took: sampling and the optimizer steps of one batch of episodes."""

    def __init__(self, trainer: TimedTrainer, *, updates: int) -> None:
        self._trainer, self._updates = trainer, updates
        self.iterations: list[dict[str, float]] = []

    def on_train_begin(self, *arguments: Any, **others: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step % self._updates == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            spent, now = self._trainer.seconds, time.perf_counter()
            whole, generated, publish = now - self._began, spent["generate"], spent["publish"]
            phases = {"collect": generated - publish, "update": whole - generated, "publish": publish}
            self.iterations.append({"iteration": whole, **phases, **self._trainer.tokens})
            spent.clear()
            self._began = time.perf_counter()


def gpu_config(config: RunConfig, order: Asked) -> GRPOConfig:
    batch, rollout, vllm = config.batch, config.rollout, order.engine == "vllm"
    updates, on_cpu = batch.trajectories // batch.mini_batch, config.model.device == "cpu"
    return grpo_config(
        config,
        updates=updates,
        rows=batch.micro_batch_tokens // config.context.max_tokens,
        use_cpu=on_cpu,
        bf16=not on_cpu,
        gradient_checkpointing=config.compute.gradient_checkpointing is True,
        max_steps=config.run.iterations * updates,
        max_completion_length=rollout.max_turns * (rollout.max_tokens_per_turn + RESULT) - RESULT,
        generation_kwargs={"max_tokens" if vllm else "max_new_tokens": rollout.max_tokens_per_turn},
        max_tool_calling_iterations=rollout.max_turns - 1,
        use_vllm=vllm,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=order.vllm_share,
        vllm_max_model_length=2 * config.context.max_tokens,
    )


def make_trainer(config: RunConfig, order: Asked) -> TimedTrainer:
    environments, source = open_tasks(config)
    (factory,) = environments.all
    tokenizer = AutoTokenizer.from_pretrained(order.model)
    tokenizer.chat_template = template_source("hermes")
    tasks = config.run.iterations * config.batch.trajectories // config.batch.group_size
    calls = bool(factory.tools)
    if calls:
        tokenizer.response_template = qwen3_template  # without it: "Unrecognized chat template"
    adapters: Any = {"r": config.lora.rank, "lora_alpha": config.lora.alpha, "target_modules": "all-linear"}
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(order.model, dtype=getattr(torch, config.model.dtype)),
        args=gpu_config(config, order),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(prompt_rows(source, tasks)),
        reward_funcs=reward if calls else coin,
        environment_factory=partial(Calculator, source, factory) if calls else None,
        peft_config=LoraConfig(**adapters, task_type="CAUSAL_LM") if config.lora.rank else None,
    )
    trainer.seconds = defaultdict(float)
    if order.engine == "vllm":
        engine: Any = trainer.vllm_generation
        engine.sync_weights = timed(trainer.seconds, "publish")(engine.sync_weights)
    return trainer


def success(config: RunConfig) -> float:
    """Held-out, by agentloop's own evaluation of `model.path`."""
    environments, source = open_tasks(config)
    actors = sampling_actors(config, environments, str(config.model.path))
    return evaluate(actors, source, config, scorer=open_scorer(config, environments)).success


def main() -> None:
    order = asked()
    config = order.config()
    trainer = make_trainer(config, order)
    watch = EachIteration(trainer, updates=config.batch.trajectories // config.batch.mini_batch)
    trainer.add_callback(watch)
    trainer.train()
    found = summary(watch.iterations)
    if torch.cuda.is_available():
        name = "at its peak, vLLM included" if order.engine == "vllm" else "at its peak"
        found[f"memory_gb: {name}"] = torch.cuda.max_memory_allocated() / 1e9
    if config.tasks.held_out:
        learned = order.folder / "trl-model"
        trainer.save_model(str(learned))
        found["success_before"] = success(config)
        found["success_after"] = success(order.config(**{"model.path": str(learned)}))
    order.answer(found)


if __name__ == "__main__":
    main()
