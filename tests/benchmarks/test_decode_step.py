"""What the contenders of a decode step sample is the same, over turns as the engine plays them."""

from __future__ import annotations

from typing import Any

import pytest

from agentloop.generation import local
from benchmarks import decode_step
from benchmarks._fixed_cache import FixedCache
from tests.agentloop.generation.test_local import conversation, llama


@pytest.mark.parametrize(
    "case",
    [{}, {"temperature": 0.6}, {"rewrite": 0}, {"rewrite": 1}, {"rewrite": 5}, {"shared": 40, "longest_news": 90}],
    ids=str,
)
def test_log_probs_with_fixed_buffers_equal_a_plain_forward_over_turns(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "EpisodeCache", FixedCache)
    assert conversation(llama(), **case) < 1e-5


def test_both_contenders_are_fed_the_same_and_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_step.torch.cuda, "is_available", lambda: False)
    found = decode_step.main()
    assert found["nats_apart_tiny"] < 1e-4
    assert found["ms_tiny_today"] > 0 and found["ms_tiny_graph"] > 0
