"""What can be declared about a batch's composition, and what is refused with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentloop.config import RunConfig
from agentloop.config.config_file import load_config, to_plain
from replay.config import StoredConfig
from replay.questions.preview import as_yaml, changed
from tests.fakes.runs import ROOT


def config(replay: dict[str, Any], *, pool: int | str = 50, **batch: int) -> RunConfig:
    sizes = {"trajectories": 32, "group_size": 8, "mini_batch": 16, **batch}
    sections = {"replay": replay, "environment": {"task_pool": pool}, "batch": sizes, "run": {"iterations": 5}}
    return RunConfig.model_validate(sections)


def fractions(replay: dict[str, Any]) -> list[float]:
    return [config(replay).mix_rule().fraction_at(iteration) for iteration in range(1, 6)]


@pytest.mark.parametrize(
    ("schedule", "course"),
    [
        ({}, [0.4] * 5),
        ({"shape": "linear", "final": 0.0}, [0.4, 0.3, 0.2, 0.1, 0.0]),
        ({"shape": "linear", "final": 0.0, "begin": 0.5}, [0.4, 0.4, 0.4, 0.2, 0.0]),
        ({"shape": "linear", "final": 0.0, "over": "iterations"}, [0.4, 0.3, 0.2, 0.1, 0.0]),
        ({"shape": "linear", "final": 0.0, "over": "iterations", "begin": 2, "end": 4}, [0.4, 0.4, 0.2, 0.0, 0.0]),
        ({"shape": "cosine", "final": 0.8}, [0.4, 0.4586, 0.6, 0.7414, 0.8]),  # 0.6 -+ 0.2 cos 45 degrees
        ({"shape": "step", "steps": [[0.5, 0.1]]}, [0.4, 0.4, 0.1, 0.1, 0.1]),
        ({"shape": "step", "over": "iterations", "steps": [[2, 0.1], [5, 0.9]]}, [0.4, 0.1, 0.1, 0.1, 0.9]),
    ],
)
def test_schedule_gives_each_iteration_its_share(schedule: dict[str, Any], course: list[float]) -> None:
    assert fractions({"fraction": 0.4, "schedule": schedule}) == pytest.approx(course, abs=1e-4)


def test_limits_of_draws_are_those_of_the_configuration() -> None:
    limits = config({"sources": {"self": 0.75, "teacher": 0.25}, "max_uses": 3, "successful_only": False}).replay.limits
    assert (limits.sources, limits.max_uses, limits.successful_only) == (("self", "teacher"), 3, False)
    assert config({}).replay.limits.sources is None


def test_stored_configuration_gives_the_rule_and_the_limits_of_the_run() -> None:
    own = config({"fraction": 0.5, "schedule": {"shape": "step", "steps": [[0.5, 0.1]]}, "max_staleness": 4})
    stored = StoredConfig.model_validate(to_plain(own))
    assert stored.replay == own.replay
    assert (stored.mix_rule(), stored.replay.limits) == (own.mix_rule(), own.replay.limits)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"fraction": "0.375", "sampler": "recency", "recency.half_life": "1e-05", "max_staleness": "8", "max_uses": ""},
        {"unit": "group", "successful_only": "false", "sampler": "difficulty", "difficulty.mode": "hard"},
        {"unit": "any", "sampler": "freshness", "freshness.sampler": "reward", "mode": "observe"},
    ],
)
def test_previewed_settings_are_a_part_of_a_configuration(tmp_path: Path, given: dict[str, str]) -> None:
    text = (ROOT / "configs" / "quickstart.yaml").read_text()
    own = load_config(ROOT / "configs" / "quickstart.yaml")
    choice = changed(StoredConfig.model_validate(to_plain(own)), given)
    before, rest = text.split("\nreplay:\n")
    after = rest[rest.index("\noptimizer:") :]
    path = tmp_path / "run.yaml"
    path.write_text(f"{before}\n{as_yaml(choice.replay)}{after}", encoding="utf-8")
    assert load_config(path).replay == choice.replay
