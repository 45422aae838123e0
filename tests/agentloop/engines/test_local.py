"""The engine's cache across turns must be invisible: same tokens, same log-probs as a plain forward."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from agentloop.config.sections.model import ComputeSection
from agentloop.engines import Completion, GenerationRequest
from agentloop.engines.generator import SampledTokens
from agentloop.engines.local.local_generator import LocalGenerator, StopStrings
from context.parse.reply import before_stop
from tests.fakes.engine_sampling import plain_log_probs
from tests.fakes.families import family

VOCABULARY = 64
STOP = 7


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def llama(attention: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation=attention)).eval()


def windowed() -> PreTrainedModel:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)).eval()


def played(
    model: PreTrainedModel,
    *,
    temperature: float = 1.0,
    rewrite: int | None = None,
    shared: int = 0,
    longest_news: int = 6,
    **settings: Any,
) -> list[tuple[list[int], Completion]]:
    """Prompts and replies over several turns of ragged episodes, some ending early."""
    rng = random.Random(3)
    engine = LocalGenerator(model, stop_ids=frozenset([STOP]), **settings)
    engine.begin(seed=11, temperature=temperature)
    beginning = [rng.randrange(8, VOCABULARY) for _ in range(shared)]
    prompts = {e: beginning + [rng.randrange(8, VOCABULARY) for _ in range(rng.randrange(1, 12))] for e in range(9)}
    turns = []
    for turn in range(5):
        requests = [GenerationRequest(e, prompt, rng.randrange(1, 9)) for e, prompt in prompts.items()]
        for request, completion in zip(requests, engine.generate(requests), strict=True):
            prompt = list(request.prompt_ids)
            turns.append((prompt, completion))
            news = [rng.randrange(8, VOCABULARY) for _ in range(rng.choice([0, 1, 2, 3, 4, 5, longest_news]))]
            prompts[request.episode] = prompt + list(completion.token_ids) + news
            if rewrite is not None and turn in (2, 3) and request.episode % 2:
                before = prompts[request.episode]
                prompts[request.episode] = before[:rewrite] + before[rewrite + 3 :] or [9]
        for ended in [e for e in prompts if rng.random() < 0.25]:
            del prompts[ended]
    return turns


def conversation(
    model: PreTrainedModel, *, temperature: float = 1.0, scored_by: PreTrainedModel | None = None, **case: Any
) -> float:
    """The largest difference of log-probs to a plain forward."""
    return max(
        abs(one - other)
        for prompt, reply in played(model, temperature=temperature, **case)
        for one, other in zip(
            plain_log_probs(scored_by or model, prompt, reply.token_ids, temperature), reply.log_probs, strict=True
        )
    )


FED_APART = {"shared": 40, "longest_news": 90}
CASES: list[dict[str, Any]] = [{}, {"temperature": 0.6}, FED_APART, *({"rewrite": at} for at in (0, 1, 5))]


@pytest.mark.parametrize(
    ("make", "case"),
    [
        *((llama, case) for case in CASES),
        *((make, case) for make in (lambda: llama("eager"), windowed) for case in ({}, FED_APART)),
    ],
)
def test_log_probs_equal_a_plain_forward_over_turns(make: Callable[[], PreTrainedModel], case: dict[str, Any]) -> None:
    assert conversation(make(), **case) < 1e-5


def fed_shapes(model: PreTrainedModel) -> list[tuple[int, ...]]:
    """[rows, tokens] of each of the model's forward passes from now on."""
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _, __, got: shapes.append(tuple(got["input_ids"].shape)), with_kwargs=True)
    return shapes


class _Letters:
    """Tokens that are letters each: what a codec is asked for here."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(64 + token) for token in ids)


def test_generator_ends_a_reply_that_completes_a_stop_string_and_keeps_its_tokens() -> None:
    sampled = SampledTokens()
    requests = [GenerationRequest(e, [8, 9, 10], 60, sampled=sampled) for e in range(40)]

    def sample(texts: tuple[str, ...]) -> list[str]:
        engine = LocalGenerator(llama(), stop_ids=frozenset(), stop_strings=StopStrings(texts, _Letters()))
        engine.begin(seed=1, temperature=1.0)
        return [_Letters().decode(completion.token_ids) for completion in engine.generate(requests)]

    def sample_with_own_stops(texts: tuple[str, ...]) -> list[str]:
        engine = LocalGenerator(llama(), stop_ids=frozenset(), stop_strings=StopStrings(texts[:1], _Letters()))
        engine.begin(seed=1, temperature=1.0)
        asked = [replace(request, stop=texts[1:]) for request in requests]
        return [_Letters().decode(completion.token_ids) for completion in engine.generate(asked)]

    free = sample(())
    assert sampled.count == 40 * 60
    assert {len(text) for text in free} == {60}
    stops = (free[0][5:7], free[1][9])
    for text in sample(stops):
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        assert len(text) == (min(ends) if ends else 60)
    assert sample(stops)[0] in free[0]
    assert sample_with_own_stops(stops) == sample(stops)


def test_stop_string_may_end_within_the_token_that_completes_it() -> None:
    codec = family("chatml").codec
    stops = StopStrings(("Observation:",), codec)
    assert stops.completed(codec.encode_text("Thought.\nObservation:\n"))
    assert stops.completed(codec.encode_text("x" * 500 + "Observation:"))
    assert not stops.completed(codec.encode_text("Observation"))
    assert before_stop("a\nObservation:\n", ("Observation:",)) == "a\n"
    assert before_stop("xabab", ("b", "ab")) == "x"
    assert before_stop("a", ("b",)) is None


def test_generator_entropy_of_a_uniform_model_is_log_vocabulary() -> None:
    model = llama()
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    engine = LocalGenerator(model, stop_ids=frozenset())
    engine.begin(seed=0, temperature=1.0)
    (completion,) = engine.generate([GenerationRequest(0, [8, 9], 3)])
    # ln 64 = 4.158883
    assert completion.entropies == pytest.approx([4.158883] * 3, abs=1e-5)
    assert completion.log_probs == pytest.approx([-4.158883] * 3, abs=1e-5)


BEGINNING = list(range(8, 38))
Prompts = list[list[int]]


@pytest.mark.parametrize(
    ("turns", "limits", "shapes"),
    [
        # What a rewritten prompt begins with is kept.
        ([[[8, 9, 10, 11, 12, 13]], [[8, 9, 10, 20, 21]]], [1], [(1, 6), (1, 2)]),
        # What all first prompts begin with is computed once.
        ([[[*BEGINNING, 40 + e, 50] for e in range(6)]], [1] * 6, [(1, 30), (6, 2)]),
        # 5 x 20 tokens saved are not worth another pass.
        ([[[*BEGINNING[:20], 40 + e, 50] for e in range(6)]], [1] * 6, [(6, 22)]),
        # Rows with more to see are fed apart: row 2 has 41 tokens to see, the others 3: 38 + 6 x 3 instead of 6 x 41.
        (
            [[[40 + e, 50] for e in range(6)], [[40 + e, *([9] * 41 if e == 2 else [9] * 3)] for e in range(6)]],
            [1] * 6,
            [(6, 2), (1, 38), (6, 3)],
        ),
        # Once half of the rows have ended, the others go on without them.
        ([[[40 + e, 50] for e in range(4)]], [2, 2, 2, 4], [(4, 2), (4, 1), (1, 1), (1, 1)]),
    ],
)
def test_passes_have_few_tokens(turns: list[Prompts], limits: list[int], shapes: list[tuple[int, int]]) -> None:
    model = llama()
    engine = LocalGenerator(model, stop_ids=frozenset())
    engine.begin(seed=0, temperature=1.0)
    seen = fed_shapes(model)
    for prompts in turns:
        engine.generate([GenerationRequest(e, ids, limits[e]) for e, ids in enumerate(prompts)])
    assert seen == shapes


NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
def test_a_publish_forgets_keys_and_takes_the_new_weights(
    autocast: Literal["none", "bfloat16"], tied: bool, device: str
) -> None:
    model = llama().to(device)  # type: ignore[arg-type]
    new_engine = partial(LocalGenerator, model, stop_ids=frozenset(), compute=ComputeSection(autocast=autocast))
    if tied:
        model.set_output_embeddings(nn.Linear(32, VOCABULARY, bias=False, device=device))
        model.get_output_embeddings().weight = model.get_input_embeddings().weight

    def sampled(engine: LocalGenerator, prompt: list[int]) -> Completion:
        return replace(engine.generate([GenerationRequest(0, prompt, 6)])[0], policy_version=0)

    old = new_engine()
    old.begin(seed=0, temperature=0.0)
    first = sampled(old, [8, 9])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    old.published(1)
    new = new_engine()
    new.begin(seed=0, temperature=0.0)
    prompt = [8, 9, *first.token_ids, 10]
    assert sampled(old, prompt) == sampled(new, prompt)
    assert sampled(new, [8, 9]) != first
