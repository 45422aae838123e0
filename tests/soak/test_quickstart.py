"""The quickstart learns, on every seed, through the front door."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from agentloop.learning.batch import build_batch
from agentloop.learning.passes import score
from agentloop.models.actor import Actor
from context import default_authors
from replay.records import BatchRow
from replay.store import ReplayStore
from tests.fakes.runs import ROOT, rows

pytestmark = pytest.mark.soak

SEEDS = 5


def quickstart(folder: Path, *settings: str, config: str = "quickstart") -> dict[str, object]:
    """The command people type; its closing figures."""
    sets = [part for setting in (f"run.folder={folder}", *settings) for part in ("--set", setting)]
    command = [Path(sys.executable).with_name("agentloop"), "train", f"configs/{config}.yaml", "--json", *sets]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def evaluations(run: Path) -> list[float]:
    return metric(run, "eval/success")


def metric(run: Path, name: str) -> list[float]:
    query = f"select value from metrics where name = '{name}' order by iteration"
    return [value for (value,) in rows(run / "replay.sqlite", query)]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_quickstart_reaches_ninety_percent_twice_in_a_row(seed: int, tmp_path: Path) -> None:
    result = quickstart(tmp_path, f"run.seed={seed}")
    success = evaluations(Path(str(result["folder"])))
    print(f"seed {seed}: {success[0]:.1%} -> {success[-2]:.1%}, {success[-1]:.1%} in {result['iterations']} iterations")
    assert success[0] <= 0.35
    assert min(success[-2:]) >= 0.90


def worst_log_prob_error(run: Path) -> float:
    """Largest |recomputed - stored| in nats over every action token in the buffer."""
    worst, checked = 0.0, 0
    store = ReplayStore.open(run / "replay.sqlite", read_only=True)
    listed = rows(run / "replay.sqlite", "select id, policy_version_min, policy_version_max from trajectories")
    for version in sorted({low for _, low, _ in listed}):
        ids = [id for id, low, high in listed if (low, high) == (version, version)]
        actor = Actor(AutoModelForCausalLM.from_pretrained(run / "policies" / f"{version:06d}"))
        batch = build_batch([BatchRow(t) for t in store.read(ids)], default_authors())
        again, _ = score(actor, batch, max_tokens=4096)
        worst = max(worst, float((again - batch.behavior_log_probs)[batch.response_mask].abs().max()))
        checked += len(ids)
    store.close()
    assert checked == len(listed) > 0
    return worst
