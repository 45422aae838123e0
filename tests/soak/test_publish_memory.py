"""A random policy of a billion parameters, held by two ranks: what rank 0 needs to publish it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.ranks import start_ranks
from tests.fakes.runs import ROOT

pytestmark = pytest.mark.soak

PROGRAM = ["-m", "tests.soak.sharded_publishes"]
BILLION = ("2048", "22")
"""Width and layers: 1.1 billion parameters, 4.4 GB."""
ROOM = 2**30
"""Bytes beside its part of the weights. The interpreter and its libraries take 0.4 GB of them before there is any."""


@pytest.mark.timeout(3600)
def test_rank_0_publishes_a_billion_parameters_in_its_part_and_1_gb(tmp_path: Path) -> None:
    subprocess.run([sys.executable, *PROGRAM, "make", tmp_path, *BILLION], cwd=ROOT, check=True, timeout=1200)
    ranks = start_ranks(2, [*PROGRAM, "publish", tmp_path])
    said = [rank.communicate(timeout=2400)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    found = json.loads((tmp_path / "memory.json").read_text())
    print(found)
    assert found["parameters"] > 10**9
    assert found["shard"] == 4 * found["parameters"] // 2
    for name in ("most while probing", "most while writing"):
        assert found[name] <= found["shard"] + ROOM, found
    # What was published is what was loaded: one rank wrote that.
    first, published = (tmp_path / name / "model.safetensors" for name in ("model", "published"))
    assert subprocess.run(["cmp", first, published]).returncode == 0
