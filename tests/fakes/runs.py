"""Runs small enough for a test: seconds from nothing to a trained agent, with all the real parts."""

import os
import signal
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from agentloop.config import RunConfig
from replay.locate import run_identity
from replay.storage.databases import Location
from tests.fakes import families as fakes
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.records import sql

ROOT = Path(__file__).parents[2]
PARITY = f"{ENVIRONMENTS / 'parity.py'}:Parity"
STRATEGY_OPTIONS = {
    "linear": ("{}", None),
    "linear_think": ("{}", "strip_thinking"),
    "sliding_window": ("{budget: 270}", "drop_turns"),
    "clip_tool_results": ("{budget: 375, keep_chars: 0}", "clip_tool_results"),
    "memory": ("{budget: 360, max_summary_tokens: 40}", "summarise"),
}
"""Options of each context strategy, and what its rewrites are counted as."""


class SilentDisplay:
    """A display that shows nothing, and keeps metrics and notes."""

    def __init__(
        self,
        *,
        at_phase: Callable[[str, int], object] = lambda name, iterations: None,
        at_iteration: Callable[[int], object] = lambda number: None,
    ) -> None:
        """What else happens: `at_phase` of this name after so many iterations, and after an iteration."""
        self.iterations: list[dict[str, float]] = []
        self.notes: list[str] = []
        self._at_phase, self._at_iteration = at_phase, at_iteration

    def phase(self, name: str, done: int, total: int, tokens: Callable[[], int] | None = None) -> None:
        self._at_phase(name, len(self.iterations))

    def iteration(self, number: int, total: int, metrics: Mapping[str, float], *, left: float) -> None:
        self.iterations.append(dict(metrics))
        self._at_iteration(number)

    def note(self, text: str) -> None:
        self.notes.append(text)


def save_qwen2(folder: Path, *, layers: int = 1, tied: bool = False) -> Path:
    """A Qwen2 folder with a ChatML tokenizer, as save_pretrained writes it. `tied`: its embeddings are its head."""
    torch.manual_seed(1)
    tokenizer = _tokenizer("chatml")
    sizes = {**_SIZES, "num_hidden_layers": layers, "tie_word_embeddings": tied}
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, initializer_range=0.05, **sizes)
    return _save(Qwen2ForCausalLM(config), tokenizer, folder)


def save_llama(folder: Path) -> Path:
    """A Llama folder with a Llama-3 tokenizer and template."""
    torch.manual_seed(2)
    tokenizer = _tokenizer("llama3")
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=4, initializer_range=0.05, **_SIZES)
    return _save(LlamaForCausalLM(config), tokenizer, folder)


def save_vllm_llama(folder: Path) -> Path:
    """A small Llama with heads of a size that vLLM's kernels take."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(2)
    tokenizer = _tokenizer("llama3")
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=2048, **sizes))
    return _save(model, tokenizer, folder)


_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}


def _tokenizer(name: str) -> PreTrainedTokenizerFast:
    family = fakes.family(name)
    return PreTrainedTokenizerFast(
        tokenizer_object=family.tokenizer, chat_template=family.template_source, **family.special_tokens
    )


def _save(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    # A model with random weights would hardly ever end a turn by itself; so many stop tokens end one in eight.
    stops = [tokenizer.eos_token_id, *range(40, 90)]
    model.generation_config = GenerationConfig(eos_token_id=stops)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small_config(folder: Path, model: Path, algorithm: str = "grpo", **sections: dict[str, Any]) -> RunConfig:
    """Three iterations of 16 trajectories; any section can be changed: batch={"group_size": 2}."""
    defaults: dict[str, dict[str, Any]] = {
        "run": {"name": "small", "folder": str(folder), "iterations": 3, "seed": 0},
        "model": {"path": str(model)},
        "environment": {"name": PARITY},
        "context": {"max_tokens": 400},
        "rollout": {"max_turns": 2, "max_tokens_per_turn": 12},
        "batch": {"trajectories": 16, "group_size": 4, "mini_batch": 8},
        "replay": {"fraction": 0.25, "sampler": "uniform", "successful_only": False},
        "evaluation": {"every": 2, "tasks": 8},
        "checkpoint": {"every": 1, "keep": 2, "keep_policies": "all"},
    }
    return RunConfig.model_validate({"algorithm": algorithm, **layered(defaults, sections)})


def layered(defaults: Mapping[str, dict[str, Any]], sections: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Sections with their own keys over the default ones."""
    return {name: {**defaults.get(name, {}), **sections.get(name, {})} for name in {*defaults, *sections}}


def buffer_of(run: Path) -> Location:
    """Where a run folder's experience is."""
    return run_identity(run).database or run / "replay.sqlite"


def rows(database: Location, query: str) -> list[tuple[Any, ...]]:
    """Plain SQL, past all of our code."""
    if not isinstance(database, Path):
        return sql(database, query)
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return connection.execute(query).fetchall()


class StopAfter(SilentDisplay):
    """Sends SIGTERM to its own process after some iterations, as a scheduler would."""

    def __init__(self, iterations: int) -> None:
        super().__init__(
            at_iteration=lambda _: len(self.iterations) == iterations and os.kill(os.getpid(), signal.SIGTERM)
        )
