"""The same learning on one rank and on two."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentloop.ranks import Ranks
from tests.agentloop import ranked_updates
from tests.agentloop.launching import start_ranks
from tests.agentloop.ranked_updates import DTYPES, UPDATES, first_half, go_on, updated, whole

WITHIN = {"float64": 1e-10, "float32": 1e-5}
LOSSES = ("actor/fresh/pg_loss", "actor/replay/pg_loss", "actor/kl_loss")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What one rank and two ranks said of the same updates, each also from the other's checkpoint half way."""
    folder = tmp_path_factory.mktemp("ranks")
    found: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        for ranks in ("one", "two"):
            (folder / name / ranks).mkdir(parents=True)
        trainer, actor, told = first_half(folder / name / "one", dtype)
        told += updated(trainer, UPDATES // 2 + 1, UPDATES)
        found[name] = {"one": told, "weights": {"one": whole(actor)}}
    processes = start_ranks(2, [Path(ranked_updates.__file__), folder])
    said = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    for name, dtype in DTYPES.items():
        told = json.loads((folder / name / "two.json").read_text())
        found[name] |= {"two": told["unbroken"], "two from one": told["resumed"]}
        found[name]["one from two"] = go_on(folder / name / "two", dtype) if name == "float64" else []
        found[name]["weights"]["two"] = load_file(folder / name / "two.safetensors")
        found[name]["files"] = sorted(path.name for path in (folder / name / "two" / "state").iterdir())
    yield found


def assert_close(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], within: float) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            assert value == pytest.approx(other[name], rel=within, abs=within), name


@pytest.mark.timeout(240)
@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_on_two_ranks_are_those_on_one(runs: dict[str, Any], dtype: str) -> None:
    found = runs[dtype]
    assert len(found["one"]) == UPDATES
    for ours, theirs in zip(found["two"], found["one"], strict=True):
        for name in LOSSES:
            assert abs(ours[name] - theirs[name]) <= WITHIN[dtype], name
    # float32 rounds otherwise in another order of sums, and twenty AdamW updates carry it on.
    assert_close(found["two"], found["one"], 1e-9 if dtype == "float64" else 1e-2)
    for name, weight in found["weights"]["two"].items():
        torch.testing.assert_close(
            weight, found["weights"]["one"][name], atol=1e-9 if dtype == "float64" else 1e-3, rtol=0
        )


def test_checkpoints_go_from_one_rank_to_two_and_back(runs: dict[str, Any]) -> None:
    found = runs["float64"]
    half = UPDATES // 2
    assert_close(found["two from one"], found["one"][half:], 1e-9)
    assert_close(found["one from two"], found["one"][half:], 1e-9)
    # Each rank wrote its own part.
    assert [name[:11] for name in found["files"]] == ["shard-00001", "shard-00002"]


def test_a_rank_takes_as_many_passes_as_the_others() -> None:
    passes = [[0], [1], [2], [3], [4]]
    assert Ranks(0, 2).share(passes) == [[0], [2], [4]]
    assert Ranks(1, 2).share(passes) == [[1], [3], None]
    assert Ranks(2, 4).share(passes) == [[2], None]
    assert Ranks().share(passes) == passes
    assert Ranks(1, 2).share([]) == []
