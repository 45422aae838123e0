"""TRL's loss and backward on tensors that agentloop's are made of too: rows, masks, advantages and old log-probs."""

from __future__ import annotations

import copy
import logging
import os
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from agentloop.config import RunConfig
from agentloop.config.sections.loss import PpoClip
from agentloop.learning.batch import ScoredBatch
from agentloop.learning.optimizer import WeightOptimizer


class TrlStep:
    """One optimizer step by `GRPOTrainer.compute_loss`, backward, and agentloop's AdamW.

    The trainer is made but never run. It is given batches as it makes them itself: prompts padded on the left,
    completions on the right, both to the longest of the step, and the rows of a pass as they come, not by length.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, config: RunConfig, *, rows: int
    ) -> None:
        self.rows = rows
        self._trainer: Any = None
        self._model, self._tokenizer, self._config = copy.deepcopy(model), tokenizer, config
        self._optimizer = WeightOptimizer(self._model, config.optimizer)

    def prepare(self, scored: ScoredBatch) -> None:
        """The step's tensors in TRL's layout: this costs no measured time."""
        passes = -(-len(scored.batch.token_ids) // self.rows)
        self._trainer = _trainer(self._model, self._tokenizer, self._config, rows=self.rows, passes=passes)
        self._passes = [_inputs(scored, span) for span in _spans(len(scored.batch.token_ids), self.rows)]

    def step(self) -> None:
        self.accumulate()
        self._optimizer.step(self._optimizer.gradient_norm())

    def accumulate(self) -> float:
        """The loss of the step, with its gradient left in the weights."""
        loss = 0.0
        self._trainer.model.train()
        for inputs in self._passes:
            part = self._trainer.compute_loss(self._trainer.model, inputs)
            part.backward()
            loss += float(part.detach())
        return loss

    def gradients(self) -> list[Tensor]:
        return [p.grad.clone() for p in self._model.parameters() if p.grad is not None]

    def clear(self) -> None:
        self._optimizer.clear_gradients()


def _trainer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, config: RunConfig, *, rows: int, passes: int
) -> Any:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    clip = config.loss.fresh.objective
    assert isinstance(clip, PpoClip)
    folder = tempfile.mkdtemp()
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=rows,
            steps_per_generation=passes,
            gradient_accumulation_steps=passes,
            num_generations=rows,
            beta=0.0,
            epsilon=clip.clip_low,
            epsilon_high=clip.clip_high,
            delta=clip.dual_clip,
            loss_type="dapo",
            report_to="none",
        ),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": "x"}]),
        reward_funcs=_no_rewards,
    )
    trainer.current_gradient_accumulation_steps = passes
    return trainer


def _no_rewards(completions: Sequence[Any], **_: Any) -> list[float | None]:
    return [0.0] * len(completions)


def _spans(count: int, size: int) -> Sequence[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def _inputs(scored: ScoredBatch, rows: slice) -> dict[str, Tensor]:
    """What `GRPOTrainer.compute_loss` is given of these rows."""
    batch = scored.batch
    first = batch.response_mask.int().argmax(dim=1)
    lengths = batch.attention_mask.sum(dim=1)
    prompt, completion = int(first.max()), int((lengths - first).max())
    columns = torch.arange(batch.token_ids.shape[1] + prompt + completion)
    padded = torch.nn.functional.pad

    def moved(values: Tensor, width: int, starts: Tensor) -> Tensor:
        """`width` columns of each row from `starts` on, which may be before the row begins."""
        wide = padded(values, (prompt, completion))
        return wide.gather(1, (starts + prompt)[:, None] + columns[None, :width])[rows]

    prompts, completions = first - prompt, first
    ids, mask = batch.token_ids, batch.attention_mask
    left = columns[None, :prompt] >= (prompt - first)[:, None]
    return {
        "prompt_ids": moved(ids, prompt, prompts) * left[rows],
        "prompt_mask": left[rows].long(),
        "completion_ids": moved(ids, completion, completions),
        "completion_mask": moved(mask.long(), completion, completions),
        "tool_mask": moved(batch.loss_mask.long(), completion, completions),
        "advantages": (batch.advantages * batch.loss_mask).sum(dim=1)[rows] / batch.loss_mask.sum(dim=1)[rows],
        "old_per_token_logps": moved(scored.old_log_probs, completion, completions),
        "num_items_in_batch": batch.loss_mask.sum(),
    }
