"""The work that `gpu` gives to both sides: a model, its tasks, and the settings of a run.

Nothing comes from a hub. SmolLM2 first learns from demonstrations to call the calculator. The larger models have random
weights and SmolLM2's tokenizer, tasks of one long prompt and one reply, and a reward that falls like a coin, for a
random model would have none.
"""

import argparse
import json
import os
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from transformers import AutoTokenizer, GenerationConfig
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from agentloop.config import RunConfig
from agentloop.config.config_file import load_config
from agentloop.models.tiny import build_tokenizer
from agentloop.supervised.sft import sft
from benchmarks._trained import typed
from benchmarks.gpu import ROOT, SMOLLM2
from examples.chat_rows import write_lines

EXAMPLE = ROOT / "examples" / "calculator_agent"
WORKS: dict[str, Any] = yaml.safe_load((ROOT / "benchmarks" / "gpu.yaml").read_text())
_TASKS = 512
_WORDS = ("the", "of", "and", "to", "in", "is", "for", "on", "with", "as", "by", "at", "from", "it", "an", "be")


class Asked(NamedTuple):
    """What a side is asked for on its command line."""

    work: str
    folder: Path
    """Model and tasks are here, and a run folder is made here."""
    engine: str
    tiny: bool
    output: int
    """Where the figures go: what was standard output."""

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def vllm_share(self) -> float:
        """Of the card's memory, for vLLM on either side."""
        share: float = WORKS[self.work]["vllm_share"]
        return share

    @property
    def shape(self) -> Mapping[str, int] | None:
        """Arguments of `LlamaConfig`; None: it is SmolLM2."""
        found: Mapping[str, int] | None = WORKS["tiny" if self.tiny else self.work].get("shape")
        return found

    def config(self, **more: Any) -> RunConfig:
        """The example's settings, with those of the work."""
        settings = {
            "run.folder": str(self.folder / "runs"),
            "model.path": str(self.model),
            "tasks.data": str(self.folder / "{split}.jsonl"),
            "rollout.parallel": 128,
            "replay.fraction": 0,
            "optimizer.warmup_iterations": 0,
            "optimizer.schedule": "constant",
            "batch.layout": "auto",
            "checkpoint.keep_policies": "none",
            "checkpoint.every": 1000,
            **(WORKS["random"] if "words" in WORKS[self.work] else {}),
            **WORKS[self.work]["settings"],
            **(WORKS["tiny"]["settings"] if self.tiny else {}),
            **more,
        }
        return load_config(EXAMPLE / "train.yaml", [f"{key}={json.dumps(value)}" for key, value in settings.items()])

    def answer(self, figures: Mapping[str, float]) -> None:
        os.write(self.output, json.dumps(figures).encode())


def asked(arguments: Sequence[str] | None = None) -> Asked:
    parser = argparse.ArgumentParser()
    parser.add_argument("work")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", default="")
    parser.add_argument("--tiny", action="store_true")
    output = os.dup(1)
    os.dup2(2, 1)  # what libraries, and programs that they start, print is for people
    return Asked(**vars(parser.parse_args(arguments)), output=output)


def summary(iterations: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians over iterations, of seconds by phase and of rates of tokens; the first pays for what is made once."""
    later = iterations[1:] or iterations

    def median(amount: str, per: str | None = None) -> float:
        return statistics.median(each[amount] / (each[per] if per else 1) for each in later)

    first = ("iteration", "collect", "update", "publish")
    others = [name for name in later[0] if name not in (*first, "sampled", "trained")]
    return {
        **{f"{phase}_s": median(phase) for phase in (*first, *others) if all(phase in each for each in later)},
        "first_iteration_s": iterations[0]["iteration"],
        "sampled_tokens_per_s": median("sampled", "collect"),
        "trained_tokens_per_s": median("trained", "update"),
    }


def coin(episode: Any) -> float:
    """The reward of a reply that says nothing."""
    return float(episode.segments[-1].tokens.token_ids.sum() % 2)


def prepare(order: Asked) -> None:
    """Write tasks, and then the model: where it is, all is there."""
    rng, words = random.Random(0), WORKS[order.work].get("words")
    order.folder.mkdir(parents=True, exist_ok=True)
    if words is None:
        typed("examples.calculator_agent.make_data", order.folder, folder=ROOT)
    else:
        rows = ({"prompt": " ".join(rng.choices(_WORDS, k=words))} for _ in range(_TASKS))
        write_lines(order.folder / "train.jsonl", rows)
    passing = order.folder / "passing"
    if order.shape is not None:
        _random_model(order.shape, passing, tiny=order.tiny)
    else:
        settings = {"model.path": SMOLLM2, "sft.data": order.folder / "demonstrations.jsonl", "run.folder": passing}
        passing = sft(load_config(EXAMPLE / "sft.yaml", [f"{key}={value}" for key, value in settings.items()])).model
    passing.rename(order.model)


def _random_model(shape: Mapping[str, int], folder: Path, *, tiny: bool) -> None:
    tokenizer = build_tokenizer(_WORDS, vocabulary=300) if tiny else AutoTokenizer.from_pretrained(SMOLLM2)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = LlamaConfig(
        **shape,
        vocab_size=len(tokenizer),
        max_position_embeddings=8192,
        eos_token_id=end,
        pad_token_id=end,
        bos_token_id=None,
        dtype=torch.float32 if tiny else torch.bfloat16,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(config.dtype)
    with torch.device("cpu" if tiny else "cuda"):
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    prepare(asked())
