"""What stands behind the test server: models in folders, sampled a few tokens at a time with the local generator.

Between two pieces weights may be replaced, as vLLM does between two steps, and each token says which weights it is of.
"""

import asyncio
import copy
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentloop.engines import Completion, ConcurrentGenerator, GenerationFailed, GenerationRequest
from agentloop.engines.local.local_generator import LocalGenerator
from agentloop.models.loading import muted_libraries

_PIECE = 4


def load(folder: Path | str, number_type: str = "float32") -> PreTrainedModel:
    with muted_libraries():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(str(folder), dtype=getattr(torch, number_type))
    return model.eval()


def plain_scores(model: PreTrainedModel, token_ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """[tokens, V] log-probs of what follows each token, by one forward over everything."""
    with torch.no_grad():
        logits = model(torch.tensor([token_ids], device=model.device)).logits[0].float() / temperature
    return logits.log_softmax(-1)


def plain_log_probs(
    model: PreTrainedModel, prompt: Sequence[int], reply: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Log-probs of the reply's tokens."""
    scores = plain_scores(model, [*prompt, *reply], temperature)
    return [scores[len(prompt) - 1 + place, token].item() for place, token in enumerate(reply)]


def next_log_probs(model: PreTrainedModel, prompt: Sequence[int], temperature: float, most: int) -> dict[int, float]:
    """Log-probs of the likeliest tokens after the prompt."""
    likeliest = plain_scores(model, prompt, temperature)[-1].topk(most)
    return dict(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True))


def replies_of(engine: ConcurrentGenerator, asked: Sequence[GenerationRequest]) -> list[Completion | GenerationFailed]:
    """Replies of an engine elsewhere to many requests at once, in their order."""

    async def one(request: GenerationRequest) -> Completion | GenerationFailed:
        try:
            return await engine.reply(request)
        except GenerationFailed as failure:
            return failure

    async def everything() -> list[Completion | GenerationFailed]:
        try:
            return list(await asyncio.gather(*map(one, asked)))
        finally:
            await engine.close()

    return asyncio.run(everything())


def save_adapter(model: Path, folder: Path, *, seed: int = 0) -> Path:
    """A LoRA adapter of the model in that folder, as PEFT writes it, that changes what the model says."""
    adapted = load(model)
    torch.manual_seed(seed)
    adapted.add_adapter(LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.5)
    with muted_libraries():
        adapted.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Asked:
    """One request, whichever route it took."""

    model: str
    prompt: tuple[int, ...]
    temperature: float
    max_tokens: int
    stop_ids: frozenset[int]
    likeliest: int = 0
    """Alternatives of the first sampled token that are given."""


@dataclass
class Sampled:
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    finish_reason: str = "length"
    likeliest: dict[int, float] = field(default_factory=dict)
    """Log-probs of the first token's alternatives, the likeliest first."""

    def spans(self) -> list[dict[str, Any]]:
        runs = [[*places] for _, places in itertools.groupby(range(len(self.labels)), key=self.labels.__getitem__)]
        return [{"version": self.labels[run[0]], "start": run[0], "end": run[-1] + 1} for run in runs]


class EngineModels:
    """The weights of an engine: a model, its adapters, and what the model's weights are called."""

    def __init__(self, folder: Path, name: str, number_type: str = "float32") -> None:
        self.name = name
        self.folder = folder
        self.number_type = number_type
        """In which it holds its weights and multiplies."""
        self.cached: dict[tuple[int, ...], PreTrainedModel] = {}
        """What made the keys and values of prompts that it has seen: the next token after one is still that one's."""
        self.stays_old = self.head_stays_old = False
        """A reload changes nothing, or all but the head, and says nothing."""
        self.before_temperature = self.gives_nan = False
        """What log-probs of next tokens are wrong by."""
        self.loaded: list[str] = []
        """Names of the folders that it was told to load."""
        self.temperature_factor = 1.0
        """By which it samples at another temperature than it is asked for."""
        self.pace_s = 0.0
        """Seconds between the pieces of a reply."""
        self.restart()
        self._seeds = itertools.count()
        self.going = asyncio.Event()
        self.going.set()
        self.aborts = self.running = 0

    def restart(self) -> None:
        """Begin again as at the first start: the first weights, no adapters, no version."""
        self.model, self.label = load(self.folder, self.number_type), "default"
        self.cached.clear()
        self.dead = False
        """A reload that fails has thrown the old weights away; the next request ends the engine."""
        self.asleep: set[str] = set()
        """Parts of its memory that it has given free: `weights`, `kv_cache`."""
        self.is_updated = False
        """Weights are being received."""
        self.adapters: dict[str, PreTrainedModel] = {}
        self.paths: dict[str, str] = {}

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.vocab_size)

    def reload(self, folder: str) -> None:
        self.loaded.append(Path(folder).name)
        if not self.stays_old:
            self._begin_change()
            new = load(folder, self.number_type)
            shapes = [{name: tensor.shape for name, tensor in m.state_dict().items()} for m in (new, self.model)]
            if shapes[0] != shapes[1]:
                raise ValueError("the shapes of the weights are other ones")
            if self.head_stays_old:
                new.get_output_embeddings().weight.data = self.model.get_output_embeddings().weight.data
            self.model, self.dead = new, False

    def _begin_change(self) -> None:
        self.dead = True
        if "weights" in self.asleep:
            raise ValueError("CUDA error: an illegal memory access was encountered")

    def sleep(self, level: int) -> None:
        self.asleep = {"weights", "kv_cache"}
        self.cached.clear()
        self.going.clear()
        if level == 2:
            self.model = copy.deepcopy(self.model)
            for weight in self.model.parameters():
                nn.init.normal_(weight)  # what happens to be there

    def wake(self, parts: Collection[str]) -> None:
        self.asleep -= set(parts) or self.asleep  # all, where none is named
        if not self.asleep:
            self.going.set()

    def receive(self, names: Sequence[str], handles: Sequence[dict[str, Any]]) -> None:
        """Weights whose handles hold the numbers themselves: there is no memory to share here."""
        self._begin_change()
        if not self.is_updated:
            raise ValueError("start_weight_update must be called before update_weights.")
        new = copy.deepcopy(self.model)
        given = {name: handle["cpu"] for name, handle in zip(names, handles, strict=True)}
        if new.load_state_dict(given, strict=False).unexpected_keys:
            raise ValueError("There is no module or parameter of that name")
        self.model, self.dead = new, False

    def load_adapter(self, name: str, path: str) -> None:
        model = load(self.folder, self.number_type)
        with muted_libraries():
            model.load_adapter(path)
        model.enable_adapters()
        self.adapters[name], self.paths[name] = model.eval(), path

    def serving(self, name: str) -> PreTrainedModel:
        return self.model if name == self.name else self.adapters[name]

    async def sample(self, asked: Asked) -> Sampled:
        sampled, limit, stop_ids = Sampled(), asked.max_tokens, asked.stop_ids
        aborts, adapter = self.aborts, self.adapters.get(asked.model)
        temperature = asked.temperature * self.temperature_factor
        model: PreTrainedModel | None = None
        self.running += 1
        if asked.likeliest:
            seen_by = adapter or self.cached.setdefault(asked.prompt, self.model)
            given = 1.0 if self.before_temperature else temperature
            sampled.likeliest = next_log_probs(seen_by, asked.prompt, given, asked.likeliest)
            if self.gives_nan:
                sampled.likeliest[next(iter(sampled.likeliest))] = math.nan
        try:
            while len(sampled.token_ids) < limit and sampled.finish_reason == "length":
                await asyncio.sleep(self.pace_s)
                await self.going.wait()
                if self.aborts > aborts:
                    sampled.finish_reason = "abort"
                    break
                if (serving := adapter or self.model) is not model:
                    model = serving
                    generator = LocalGenerator(model, stop_ids=stop_ids)
                    generator.begin(seed=next(self._seeds), temperature=temperature)
                piece = min(_PIECE, limit - len(sampled.token_ids))
                (part,) = generator.generate([GenerationRequest(0, [*asked.prompt, *sampled.token_ids], piece)])
                sampled.token_ids += part.token_ids
                sampled.log_probs += part.log_probs
                sampled.labels += [self.label] * len(part.token_ids)
                if part.token_ids[-1] in stop_ids:
                    sampled.finish_reason = "stop"
        finally:
            self.running -= 1
        return sampled

    def prompt_log_probs(self, asked: Asked) -> list[dict[str, Any] | None]:
        """Each token of the prompt but the first, as `prompt_logprobs` gives them."""
        given = plain_log_probs(self.serving(asked.model), asked.prompt[:1], asked.prompt[1:])
        return [None, *({str(token): {"logprob": one}} for token, one in zip(asked.prompt[1:], given, strict=True))]
