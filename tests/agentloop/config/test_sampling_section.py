"""How a run is told what to draw, and that it draws so."""

from pathlib import Path
from typing import Any

import pytest

from agentloop.training.train import train
from agentloop.user_code import load_sampler
from replay.config import ReplayConfig
from replay.sampling.samplers import Sampler
from tests.agentloop.training.test_mixing_runs import pooled
from tests.fakes.batch_rows import row, run_config, segment, tiny_actor, trainer
from tests.fakes.refusals import refusal_of
from tests.fakes.runs import SilentDisplay, rows

OWN = """
import numpy as np
from dataclasses import dataclass
from replay import Sampler

class Long(Sampler):
    @dataclass(frozen=True)
    class Options:
        power: float = 1.0

    def weights(self, rows):
        return rows.num_action_tokens ** self.options.power

class Negative(Sampler):
    def weights(self, rows):
        return -np.ones(len(rows))

class Other:
    pass
"""


def made(sampler: str, sampler_options: dict[str, Any]) -> Sampler:
    given = ReplayConfig(sampler=sampler, sampler_options=sampler_options)
    return load_sampler(given.sampler, 0, given.sampler_options)


def test_sampler_of_ones_own_is_a_class_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    sampler = made(f"{tmp_path}/mine.py:Long", {"power": 2})
    assert sampler.options.power == 2
    for name, told in (
        ("Long", "must hold options of Long, got 'pwer'. Did you mean power?"),
        ("Other", "replay.sampler must name a subclass of replay.Sampler, got"),
        ("Negative", "weights of sampler Negative must be finite and >= 0, got -1.0"),
    ):
        options = {"pwer": 2} if name == "Long" else {}
        assert told in refusal_of(made, f"{tmp_path}/mine.py:{name}", options)


@pytest.mark.slow
def test_run_draws_by_the_entropy_of_its_present_policy(tmp_path: Path, qwen2: Path) -> None:
    sampler = {"sampler": "entropy", "sampler_options": {"policy": "current"}}
    result = train(pooled(tmp_path, qwen2, {"successful_only": False, **sampler}), display=SilentDisplay())
    query = "select distinct iteration, probability from draws where stream = 'replay' order by 1"
    assert rows(result.folder / "replay.sqlite", query) == [(2, None), (3, None), (4, None)]


def test_current_entropy_is_that_of_the_policy_over_action_tokens() -> None:
    actor = tiny_actor()
    one, other = row("a", segment("uull", seed=1)), row("b", segment("uuuuul", seed=2))
    learner = trainer(actor, run_config())
    apart = [learner.mean_entropies([each.trajectory])[0] for each in (one, other)]
    assert learner.mean_entropies([one.trajectory, other.trajectory]) == pytest.approx(apart, rel=1e-5)
    # A fresh row's entropy, as the update measures it.
    assert learner.update([one], iteration=1).metrics["actor/entropy"] == pytest.approx(apart[0], rel=1e-5)
