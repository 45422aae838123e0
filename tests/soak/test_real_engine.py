"""A real vLLM samples from what is published to it, refuses nothing that is right, and the quickstart learns by it.

`make setup-vllm` first.
"""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from agentloop.engines.publish.engine_control import EngineControl
from agentloop.engines.publish.proof import publish
from agentloop.engines.publish.published_policy import version_in
from agentloop.models.loading import LoadedModel
from tests.fakes.engine_sampling import plain_log_probs
from tests.fakes.published_policies import label, published, step, tiny_learner, with_adapter
from tests.soak.test_quickstart import evaluations, metric, quickstart
from tests.vllm.server import KEY, missing, real_engine

pytestmark = [pytest.mark.soak, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Engine:
    control: EngineControl
    learner: LoadedModel
    first: Path
    """What it was started with: the learner's first policy, with a head of its own."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with started(tmp_path_factory.mktemp("engine"), lora_rank=8) as engine:
        yield engine


@pytest.fixture
def engine_for_whole_weights(tmp_path: Path) -> Iterator[Engine]:
    """One for adapters ends when it is to score a prompt while others sample, which whole weights are proved by."""
    with started(tmp_path, lora_rank=0) as engine:
        yield engine


@contextmanager
def started(folder: Path, *, lora_rank: int) -> Iterator[Engine]:
    learner = tiny_learner(folder / "model")
    published(folder / "000000", learner)
    with real_engine(folder / "000000", folder, lora_rank=lora_rank) as control:
        yield Engine(control, learner, folder / "000000")


def generate(url: str, prompt: list[int], *, model: str = "tiny", **sampling: Any) -> dict[str, Any]:
    """One reply, by a request that may read what is cached."""
    given = {"temperature": TEMPERATURE, "detokenize": False, "top_p": 1.0, "top_k": -1, **sampling}
    body = {"model": model, "token_ids": prompt, "sampling_params": given}
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx2.post(f"{url}/inference/v1/generate", json=body, headers=headers, timeout=120)
    choice: dict[str, Any] = answer.raise_for_status().json()["choices"][0]
    return choice


def replies(engine: EngineControl, model: str, prompts: list[list[int]], *, length: int) -> list[dict[str, Any]]:
    """Long ones, which are to be under way when the next policy comes."""

    def ask(prompt: list[int]) -> dict[str, Any]:
        return generate(engine.url, prompt, model=model, max_tokens=length, logprobs=0, ignore_eos=True)

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(ask, prompts))


def gaps_of(learner: LoadedModel, prompt: list[int], choice: dict[str, Any]) -> torch.Tensor:
    """Nats between what an engine says of its reply's tokens and what the learner does."""
    found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    own = plain_log_probs(learner.model, prompt, choice["token_ids"], TEMPERATURE)
    return (torch.tensor(found) - torch.tensor(own)).abs()


def test_fifty_adapters_are_each_sampled_by_name_while_the_next_is_published(engine: Engine, tmp_path: Path) -> None:
    publish(engine.control, engine.first)
    learner = with_adapter(engine.first, engine.learner)
    prompts = [[5 + number, 9, 40] for number in range(8)]
    names, worst, tokens, before = list[str](), 0.0, 0, learner
    with ThreadPoolExecutor(1) as pool:
        for version in range(50):
            step(learner, seed=version, size=0.1)
            folder = tmp_path / f"{version:06d}"
            published(folder, learner, run="fifty", version=version)
            under_way = pool.submit(replies, engine.control, names[-1], prompts, length=200) if names else None
            assert publish(engine.control, folder).weights.difference < 1e-4
            if under_way is not None:
                for prompt, choice in zip(prompts, under_way.result(), strict=True):
                    gaps = gaps_of(before, prompt, choice)
                    worst, tokens = max(worst, float(gaps.max())), tokens + len(gaps)
            names.append(label(folder))
            before = replace(learner, model=copy.deepcopy(learner.model))
            ours = [name for name in engine.control.adapters() if version_in(name, "fifty") is not None]
            assert ours == names[-2:]
    print(f"50 adapters: {tokens} tokens of the one before, within {worst:.1e} nats")
    assert len(set(names)) == 50 and worst < 1e-3 and tokens > 49 * 8


def test_tokens_are_of_their_spans_version_over_100_publishes(engine_for_whole_weights: Engine, tmp_path: Path) -> None:
    engine = engine_for_whole_weights
    publish(engine.control, engine.first)
    learner = tiny_learner(tmp_path / "model")
    prompts = [[5 + number, 9, 40] for number in range(8)]
    by_label, collected = dict[str, LoadedModel](), list[tuple[list[int], dict[str, Any]]]()
    with ThreadPoolExecutor(1) as pool:
        under_way = None
        for version in range(1, 101):
            step(learner, seed=version)
            policy = published(tmp_path / f"{version:06d}", learner, run="hundred", version=version)
            by_label[policy.label] = replace(learner, model=copy.deepcopy(learner.model))
            assert publish(engine.control, tmp_path / f"{version:06d}").weights.difference < 1e-4
            if under_way is not None and under_way.done():
                collected += zip(prompts, under_way.result(), strict=True)
                under_way = None
            under_way = under_way or pool.submit(replies, engine.control, "tiny", prompts, length=400)
        if under_way is not None:
            collected += zip(prompts, under_way.result(), strict=True)
    assert len(by_label) == 100
    worst, tokens, several = 0.0, 0, 0
    for prompt, choice in collected:
        ids, spans = choice["token_ids"], choice["weight_versions"]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == len(ids)
        for span in spans:
            gaps = gaps_of(by_label[span["version"]], prompt, choice)[span["start"] : span["end"]]
            worst = max(worst, float(gaps.max()))
        tokens, several = tokens + len(ids), several + (len(spans) > 1)
    print(f"100 publishes: {tokens} tokens of {len(collected)} replies within {worst:.1e} nats, {several} over one")
    assert worst < 1e-3 and several > len(collected) / 4


@pytest.mark.parametrize(("rank", "learning_rate"), [(0, 1.5e-3), (16, 5e-3)], ids=["weights", "adapters"])
def test_quickstart_learns_through_vllm(
    rank: int, learning_rate: float, warmed_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTLOOP_ENGINE_KEY", KEY)
    with real_engine(warmed_up, tmp_path, lora_rank=rank) as engine:
        result = quickstart(
            *(tmp_path, f"model.path={warmed_up}", "rollout.engine=vllm", f'engine.urls=["{engine.url}"]'),
            *("context.max_tokens=1024", "run.stop_at_success=0.95"),
            *(f"lora.rank={rank}", f"optimizer.learning_rate={learning_rate}"),
        )
    run = Path(str(result["folder"]))
    success, gaps = evaluations(run), metric(run, "actor/fresh/token_gap_max")
    shown = ", ".join(f"{share:.1%}" for share in success)
    print(f"rank {rank}: {shown} in {result['iterations']} iterations; gap at most {max(gaps):.6f} nats")
    assert max(success) >= 0.95
    assert len(gaps) == result["iterations"]
    assert max(gaps) <= 0.0009995  # log 1.001
