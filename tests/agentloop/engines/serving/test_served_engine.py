"""How a run starts its engine: the way that weights take, and how deep it sleeps, follow from what is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentloop.engines.serving.served_engine import serve_options
from tests.fakes.runs import small_config

NOT_KEPT = {"keep_policies": "none"}


@pytest.mark.parametrize(
    ("sections", "shares_gpu", "level", "in_memory"),
    [
        ({"checkpoint": NOT_KEPT}, True, 2, True),
        ({"checkpoint": NOT_KEPT, "engine": {"transfer": "file"}}, True, 2, False),
        ({"checkpoint": {"keep_policies": "all"}}, True, 2, False),
        ({"checkpoint": NOT_KEPT, "lora": {"rank": 4}}, True, 1, False),
        ({"checkpoint": NOT_KEPT}, False, 0, False),
    ],
)
def test_sleep_and_transfer_follow_the_run(
    sections: dict[str, dict[str, Any]], shares_gpu: bool, level: int, in_memory: bool
) -> None:
    given = {**sections, "engine": {"serve": True, **sections.get("engine", {})}, "rollout": {"engine": "vllm"}}
    options = serve_options(small_config(Path("runs"), Path("model"), **given), "model", shares_gpu=shares_gpu)
    assert (options.sleep_level, options.shares_memory) == (level, in_memory)
    assert options.lora_rank == sections.get("lora", {}).get("rank", 0)
    assert (options.model, options.max_model_len, options.memory_share) == ("model", 400, 0.4)
    assert options.url == f"http://127.0.0.1:{options.port}"
