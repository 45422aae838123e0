"""A real vLLM in bfloat16: moving policies pass, and weights of before are refused once they can be told."""

from pathlib import Path
from typing import Any

import pytest
import torch

from agentloop.engines.publish.proof import ProofFailed, prove, publish
from tests.fakes.engine_sampling import load, next_log_probs
from tests.fakes.published_policies import TEXT, prober, published, step, tiny_learner
from tests.soak.test_real_engine import generate
from tests.vllm.server import missing, real_engine

pytestmark = [pytest.mark.soak, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


def test_publishes_in_bfloat16(tmp_path: Path) -> None:
    learner = tiny_learner(tmp_path / "model")
    probes = prober(learner, number_type="bfloat16")
    chance = torch.Generator().manual_seed(0)
    rows = tuple(tuple(torch.randint(0, 300, (49,), generator=chance).tolist()) for _ in range(16))
    published(tmp_path / "000000", learner, probes=probes)
    told: list[tuple[float, bool]] = []
    with real_engine(tmp_path / "000000", tmp_path, number_type="bfloat16") as engine:
        publish(engine, tmp_path / "000000")
        for version in range(1, 31):
            probes.remember(rows)
            step(learner, seed=version, size=10 ** (-6 + version % 5))
            folder = tmp_path / f"{version:06d}"
            policy = published(folder, learner, version=version, probes=probes)
            # What the engine still has, under the new name.
            engine.name_weights(policy.label)
            try:
                prove(engine, policy)
                refused = False
            except ProofFailed:
                refused = True
            engine.name_weights("what it has")  # a name that passed its proof would be sent nothing
            proof = publish(engine, folder)
            error = proof.weights.error
            told.append((float("inf") if error is None else error, refused))
            print(version, proof.weights, "stale: refused" if refused else "stale: passed")
    assert all(refused for error, refused in told if error < 0.1)
    assert any(error < 0.1 for error, _ in told) and any(not refused for _, refused in told)


def test_keys_and_values_of_a_prompt_are_made_anew_after_a_publish(tmp_path: Path) -> None:
    learner = tiny_learner(tmp_path / "model")
    published(tmp_path / "000000", learner)
    # Longer than the blocks that are cached.
    prompt = [token for text in TEXT[:40] for token in learner.tokenizer.encode(text)][:600]
    with real_engine(tmp_path / "000000", tmp_path) as engine:
        publish(engine, tmp_path / "000000")
        for version in (0, 1):
            if version:
                step(learner, seed=1, size=0.05)
                published(tmp_path / "000001", learner, version=1)
                publish(engine, tmp_path / "000001")
            model: Any = load(tmp_path / f"{version:06d}")
            wanted = next_log_probs(model, prompt, 0.7, 20)
            for _ in range(2):  # the second time it is cached
                found = cached_next(engine.url, prompt)
                assert found == pytest.approx({token: wanted[token] for token in found}, abs=1e-3)


def cached_next(url: str, prompt: list[int]) -> dict[int, float]:
    """The likeliest next tokens."""
    (token,) = generate(url, prompt, max_tokens=1, logprobs=10)["logprobs"]["content"]
    likeliest = sorted(token["top_logprobs"], key=lambda one: -one["logprob"])[:10]
    return {one["token_id"]: one["logprob"] for one in likeliest}
