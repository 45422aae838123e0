"""How a run is told what to draw, and that it draws so."""

from pathlib import Path
from typing import Any

from agentloop.user_code import load_sampler
from replay.config import ReplayConfig
from replay.sampling.samplers import Sampler
from tests.fakes.refusals import refusal_of

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
