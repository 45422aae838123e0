"""A large random policy that two ranks hold and publish: how much memory rank 0 takes for it.

`python -m tests.soak.sharded_publishes make FOLDER HIDDEN LAYERS` writes the model, `... publish FOLDER` is a rank's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from agentloop.config import RunConfig
from agentloop.distributed.ranks import Ranks, process_group
from agentloop.learning.ranked_trainer import RankedTrainer, TrainerSpec, serve_rank
from agentloop.models.actor import Actor
from agentloop.models.adapters import load_policy
from agentloop.training.policies.engine_publisher import Prober
from agentloop.training.policies.publish import write_published
from tests.fakes.runs import llama_tokenizer, small_config

VOCABULARY = 32_000
"""As Llama 2 has it."""


def make(folder: Path, *, hidden: int, layers: int) -> None:
    """A Llama with random weights in float32 and a head of its own."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 512,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    tokenizer = llama_tokenizer()
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def config(folder: Path) -> RunConfig:
    return small_config(
        folder / "runs",
        folder / "model",
        rollout={"engine": "vllm"},
        engine={"urls": ["http://127.0.0.1:1"]},
        optimizer={"name": "sgd"},
    )


def memory(name: str) -> int:
    """Bytes: VmRSS, or VmHWM, the most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def publish(folder: Path) -> None:
    torch.set_num_threads(1)
    with process_group(timeout_s=600) as ranks:
        if ranks.index:
            serve_rank(ranks)
        else:
            (folder / "memory.json").write_text(json.dumps(_measured(folder, ranks)))


def _measured(folder: Path, ranks: Ranks) -> dict[str, int]:
    """Bytes of rank 0."""
    measured = {"at first": memory("VmRSS")}
    chosen = config(folder)
    loaded = load_policy(chosen, folder / "model")
    actor = Actor(loaded.model, compute=chosen.compute)
    spec = TrainerSpec(chosen, folder / "model", None, chosen.context.author_table())
    leader = RankedTrainer(spec, ranks, actor, samples=False, reference=None)
    parameters = list(loaded.model.parameters())
    measured["parameters"] = sum(parameter.numel() for parameter in parameters)
    own = [parameter.to_local() for parameter in parameters if isinstance(parameter, DTensor)]
    measured["shard"] = sum(part.numel() * part.element_size() for part in own)
    measured |= {"most while loading": memory("VmHWM"), "loaded": memory("VmRSS")}
    forget_peak()
    probe = Prober(leader.weights, "bfloat16", 1.0).probe(loaded.tokenizer)
    measured["most while probing"] = memory("VmHWM")
    forget_peak()
    write_published(folder / "published", leader.weights, leader.weights.save, probe=probe, run="large", version=1)
    measured["most while writing"] = memory("VmHWM")
    return measured


def main(command: str, folder: Path, *sizes: int) -> None:
    if command == "make":
        make(folder / "model", hidden=sizes[0], layers=sizes[1])
    else:
        publish(folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
