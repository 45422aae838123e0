"""A pretrained model learns from rewards what its demonstrations did not show, by the commands of its page."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.soak.test_quickstart import evaluations

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
TASKS = 256
"""Held-out ones, of kinds that nothing is learned on."""


def started(folder: Path, *words: str) -> None:
    """In `folder`, where the example's paths lead to a checkout's files and to folders of its own."""
    subprocess.run([sys.executable, "-m", *words], cwd=folder, check=True, timeout=3000)


def trained(folder: Path) -> tuple[float, float]:
    """Held-out success after the supervised start, and after training."""
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "models").mkdir()
    (folder / "models" / MODEL.name).symlink_to(MODEL)
    started(ROOT, "examples.calculator_agent.model")
    started(folder, "examples.calculator_agent.make_data")
    started(folder, "agentloop", "sft", "examples/calculator_agent/sft.yaml")
    start = "model.path=runs/calculator-agent-sft-001/model"
    started(folder, "agentloop", "train", "examples/calculator_agent/train.yaml", "--set", start)
    success = evaluations(folder / "runs/calculator-agent-001")
    return success[0], success[-1]


def check(before: float, after: float) -> None:
    gain = after - before
    error = 1.96 * math.sqrt(sum(success * (1 - success) / TASKS for success in (before, after)))
    print(f"held-out success: {before:.1%} -> {after:.1%}: {gain * 100:+.1f} points +- {error * 100:.1f}")
    assert gain - error > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_pretrained_model_learns_on_a_cpu(tmp_path: Path) -> None:
    check(*trained(tmp_path))


@pytest.mark.gpu
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_pretrained_model_learns_on_a_gpu(tmp_path: Path) -> None:
    check(*trained(tmp_path))
