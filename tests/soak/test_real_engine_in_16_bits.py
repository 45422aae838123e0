"""A real vLLM in bfloat16: moving policies pass, and weights of before are refused once they can be told."""

from pathlib import Path

import pytest
import torch

from agentloop.engines.publish.proof import ProofFailed, prove, publish
from tests.fakes.published_policies import prober, published, step, tiny_learner
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
