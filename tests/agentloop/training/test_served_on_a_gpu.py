"""One GPU, learner and vLLM by turns: vLLM sleeps while the learner updates, and every policy it gets is proved."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from agentloop import train
from agentloop.engines.publish.proof import PROOFS
from agentloop.engines.serving.engine_process import EXECUTABLE_VARIABLE
from tests.fakes.runs import SilentDisplay, save_vllm_llama, small_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(EXECUTABLE_VARIABLE not in os.environ, reason=f"{EXECUTABLE_VARIABLE} names no vLLM"),
    pytest.mark.timeout(1200),
]
SHARE = 0.4


@pytest.mark.parametrize(
    "sections",
    [{"checkpoint": {"keep_policies": "none"}}, {"engine": {"transfer": "file"}}, {"lora": {"rank": 8}}],
    ids=["memory", "file", "adapters"],
)
def test_a_gpu_is_shared_by_turns(tmp_path: Path, sections: dict[str, dict[str, Any]]) -> None:
    served = {"serve": True, "memory_share": SHARE, "options": ["--dtype", "bfloat16"], **sections.get("engine", {})}
    given = {"rollout": {"engine": "vllm"}, **sections, "engine": served}
    free: dict[str, float] = {}

    def measure(phase: str, iterations: int) -> None:
        left, whole = torch.cuda.mem_get_info()
        free[phase] = left / whole

    display = SilentDisplay(at_phase=measure)
    result = train(small_config(tmp_path / "runs", save_vllm_llama(tmp_path / "model"), **given), display=display)
    proofs = [json.loads(line) for line in (result.folder / "policies" / PROOFS).read_text().splitlines()]
    assert [proof["holds"] for proof in proofs] == [True] * 4
    folders = [path.name for path in (result.folder / "policies").iterdir() if path.is_dir()]
    assert (folders == []) == ("keep_policies" in sections.get("checkpoint", {}))
    assert all(metrics["time/sleep"] > 0 and metrics["time/wake"] > 0 for metrics in display.iterations)
    assert free["update"] - free["collect"] >= SHARE / 2
