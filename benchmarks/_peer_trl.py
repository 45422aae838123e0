"""TRL's side of `vs_trl`: GRPOTrainer with the quickstart's environment behind `environment_factory`.

Set as kindly as could be found: no gradient checkpointing and no bfloat16 (both on by default, both slower here),
replies capped as agentloop's are, the quickest batch per pass of 8 to 64 rows, nothing logged, saved or drawn.
"""

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.chat_template_utils import qwen3_template
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from agentloop.config import RunConfig
from agentloop.environments import EnvironmentFactory, Task, TaskSource, open_tasks
from agentloop.environments.lookup_chain import MAX_CALLS
from agentloop.models.loading import load_model
from benchmarks._peer import MOST_ITERATIONS, UPDATES, Talk, order, run_config
from context import Message, Renderer, ToolCall
from context.templates.rendering.reply_end import Sampled

ROWS_PER_PASS = 16


class PlayedTask:
    """An environment as TRL asks for it. Of its subclasses every public method but `reset` is a tool."""

    def __init__(self, source: TaskSource, factory: EnvironmentFactory) -> None:
        self._source, self._factory = source, factory
        self._environment: Any
        self._task: Task

    def reset(self, **row: Any) -> None:
        self._task = self._source.train(row["index"])
        self._environment = self._factory.create()
        self._environment.start(self._task)

    def _reward(self, completion: Sequence[Mapping[str, Any]]) -> float:
        last = completion[-1]
        if last["role"] != "assistant" or last.get("tool_calls"):
            return 0.0
        score: float = self._environment.reward(self._task, [_message(row) for row in completion])
        return score


def _message(row: Mapping[str, Any]) -> Message:
    calls = [call["function"] for call in row.get("tool_calls") or ()]
    asked_for = tuple(ToolCall(call["name"], call["arguments"]) for call in calls)
    return Message(row["role"], row.get("content") or "", tool_calls=asked_for)


class LookUps(PlayedTask):
    def lookup(self, key: str) -> str:
        """Look up the record of a key.

        Args:
            key: The key.
        """
        return json.dumps(self._environment.lookup(key))


def reward(completions: Sequence[Any], environments: Sequence[PlayedTask], **_: Any) -> list[float | None]:
    return [environment._reward(each) for environment, each in zip(environments, completions, strict=True)]


def prompt_rows(source: TaskSource, count: int) -> list[dict[str, Any]]:
    """The first tasks, with what an environment's `reset` is given."""
    tasks = [source.train(index) for index in range(count)]
    shown = [[{"role": said.role, "content": said.content} for said in task.messages()] for task in tasks]
    return [{"prompt": prompt, "index": index} for index, prompt in enumerate(shown)]


class RenderedTrainer(GRPOTrainer):
    """Writes prompts and tool results in the model's tokens; none of their content becomes a control token."""

    renderer: Renderer
    tool_descriptions: Sequence[Mapping[str, Any]]

    def _tokenize_prompts(self, prompts: list[list[dict[str, Any]]]) -> tuple[list[list[int]], None, dict[str, Any]]:
        messages = [[Message(row["role"], row["content"], author="env") for row in prompt] for prompt in prompts]
        rendered = [self.renderer.initial(each, self.tool_descriptions) for each in messages]
        return [tokens.token_ids.tolist() for tokens in rendered], None, {}

    def _get_tool_suffix_ids(self, tool_messages: list[dict[str, Any]]) -> list[int]:
        reply = Message("assistant", "", author="llm", tool_calls=(ToolCall("lookup", {}),))
        results = [Message("tool", row["content"], author="env", name=row["name"]) for row in tool_messages]
        asked = Message("user", "x")
        before = self.renderer.render([asked], self.tool_descriptions)
        grown = self.renderer.render([asked, reply, *results], self.tool_descriptions, after=before)
        added = self.renderer.increment(before, grown, Sampled("", min(self.renderer.end_ids)))
        assert added is not None, "the quickstart's template only appends"
        return [int(token) for token in added.token_ids]


class EachBatch(TrainerCallback):
    """After the optimizer steps of one batch of episodes, the judge is asked."""

    def __init__(self, talk: Talk, *, updates: int, fresh: int) -> None:
        self._talk, self._updates, self._fresh = talk, updates, fresh

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step % self._updates == 0 and not self._talk.goes_on(others["model"], fresh=self._fresh):
            control.should_training_stop = True


def grpo_config(config: RunConfig, *, updates: int, rows: int, **others: Any) -> GRPOConfig:
    """The run's settings in TRL's words, on one CPU thread, with `rows` a pass; `others` are GRPOConfig's own."""
    batch, loss, optimizer = config.batch, config.loss.fresh.objective.arguments, config.optimizer
    passes = batch.trajectories // rows
    settings: dict[str, Any] = {
        "output_dir": f"{config.run.folder}/trl",
        "seed": config.run.seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "learning_rate": optimizer.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "max_steps": MOST_ITERATIONS * updates,
        "per_device_train_batch_size": rows,
        "steps_per_generation": passes,
        "gradient_accumulation_steps": passes // updates,
        "num_generations": batch.group_size,
        "shuffle_dataset": False,
        "temperature": config.rollout.temperature,
        "max_completion_length": 320,
        "generation_kwargs": {"max_new_tokens": config.rollout.max_tokens_per_turn},
        "max_tool_calling_iterations": MAX_CALLS,
        "beta": 0.0,
        "epsilon": loss["clip_low"],
        "epsilon_high": loss["clip_high"],
        "delta": loss["dual_clip"],
        "loss_type": "dapo",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return GRPOConfig(**settings | others)


def make_trainer(config: RunConfig, asked: Namespace) -> RenderedTrainer:
    environments, source = open_tasks(config)
    (factory,) = environments.all
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    tokenizer.response_template = qwen3_template  # without it: "Unrecognized chat template"
    tasks = MOST_ITERATIONS * config.batch.trajectories // config.batch.group_size
    trainer = RenderedTrainer(
        model=AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32),
        args=grpo_config(config, updates=UPDATES, rows=ROWS_PER_PASS),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(prompt_rows(source, tasks)),
        reward_funcs=reward,
        environment_factory=partial(LookUps, source, factory),
    )
    trainer.tool_descriptions = factory.tools
    trainer.renderer = load_model(config.model, asked.model).renderer(config.context.author_table())
    return trainer


def main() -> None:
    asked = order()
    talk = Talk(asked.weights)
    config = run_config(asked)
    torch.set_num_threads(config.run.threads)
    trainer = make_trainer(config, asked)
    trainer.add_callback(EachBatch(talk, updates=UPDATES, fresh=config.batch.trajectories))
    talk.begin()
    trainer.train()


if __name__ == "__main__":
    main()
