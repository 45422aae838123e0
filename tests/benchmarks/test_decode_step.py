"""What the contenders of a decode step say is the same."""

from __future__ import annotations

import pytest

from benchmarks import decode_step


def test_contenders_are_fed_the_same_and_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_step.torch.cuda, "is_available", lambda: False)
    found = decode_step.main()
    assert found["nats_apart_tiny"] < 1e-4 and found["nats_apart_tiny_continuous"] < 1e-4
    assert all(found[f"ms_tiny_{contender}"] > 0 for contender in ("growing", "graph", "continuous"))
