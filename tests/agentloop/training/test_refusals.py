"""What a run refuses before it begins, each in one line and without a trace, and what it refuses as it resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentloop.config import RunConfig
from agentloop.config.config_file import load_config
from agentloop.errors import UserError
from agentloop.training.train import train
from replay import ReplayError
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.runs import PARITY, SilentDisplay, small_config

Given = dict[str, Any]
"""Settings by their dotted keys."""
GOALS = ENVIRONMENTS / "goals.py"
FUNCTION, TURN, BPP = {"advantage.function": "a.py:f"}, {"advantage.credit": "turn"}, "reinforce++_baseline"
POOL = {"environment.task_pool": 8, "replay.fraction": 0.5}
ROUNDS, SERVE = {"rollout.dynamic_sampling_rounds": 1}, {"engine.serve": True, "rollout.engine": "vllm"}
URLS = {"rollout.engine": "vllm", "engine.urls": ["http://127.0.0.1:8000"]}
HINDSIGHT = {"replay.hindsight.enable": True, "replay.sources": {"hindsight": 0.5, "self": 0.5}, "replay.fraction": 0.5}

CONFIGURATIONS: list[tuple[Given, str]] = [
    ({"algorithm": "dr_grpo", "advantage.normalise_std": True}, "advantage.normalise_std must be null or false"),
    (FUNCTION | {"advantage.normalise_std": False}, "normalise_std must be null when advantage.function is set.*false"),
    (
        {"algorithm": BPP, "advantage.normalise_std": False},
        r"normalise_std must be null when algorithm is reinforce\+\+_baseline.*algorithm: dr_grpo\.",
    ),
    ({"algorithm": BPP} | ROUNDS, r"dynamic_sampling_rounds must be 0 when algorithm is reinforce\+\+_baseline"),
    ({"algorithm": BPP} | TURN, "advantage.credit must be trajectory when algorithm is reinforce"),
    (
        TURN | {"replay.negative_weight": 0.5, "loss.replay.missing_log_probs": "bc"},
        "replay.negative_weight must be 1 when advantage.credit is turn and loss.replay has bc .*0.5",
    ),
    (FUNCTION | {"algorithm": "opo"}, "algorithm must be left out when advantage.function takes its place"),
    ({"advantage.turn_gamma": 0.9}, "advantage.turn_gamma must be 1 when advantage.credit is trajectory"),
    ({"reward.model.label": 1}, "reward.model.path must be set when reward.model.label is"),
    ({"reward.overlong.penalty": 2.0}, "reward.overlong.buffer must be set when reward.overlong.penalty is"),
    *(
        ({"algorithm": "ppo", key: value}, f"{key} must be .* when algorithm is ppo")
        for key, value in {
            **FUNCTION,
            **TURN,
            **ROUNDS,
            "advantage.normalise_batch": "scale",
            "replay.baseline": "split",
            "replay.negative_weight": 0.5,
        }.items()
    ),
    (FUNCTION | TURN, "advantage.credit must be trajectory when advantage.function is set"),
    (TURN | {"replay.fraction": 0.5}, "replay.baseline must not be stored when advantage.credit is turn"),
    (TURN | ROUNDS, "rollout.dynamic_sampling_rounds must be 0 when advantage.credit is turn"),
    (POOL | ROUNDS | {"replay.unit": "trajectory"}, "dynamic_sampling_rounds must be 0 when replay.unit is trajectory"),
    (
        POOL | {"algorithm": "reinforce++", "replay.complete_zero_variance": True},
        r"replay.complete_zero_variance must be false when algorithm is reinforce\+\+",
    ),
    (
        POOL | {"replay.complete_zero_variance": True, "replay.baseline": "split"},
        "replay.complete_zero_variance must be false when replay.baseline is split",
    ),
    (POOL | {"algorithm": "remax", "replay.baseline": "shared"}, "baseline must be stored when algorithm is remax"),
    (
        POOL | FUNCTION | {"replay.baseline": "fresh_only"},
        "replay.baseline must be stored, shared or split when advantage.function is set",
    ),
    (
        {"replay.fraction": 0.5, "replay.baseline": "shared"},
        "environment.task_pool must be a number when replay.baseline is shared",
    ),
    (HINDSIGHT | {"replay.sources": {"self": 1.0}}, "replay.sources must let rows of source hindsight be drawn"),
    (HINDSIGHT | {"replay.fraction": 0.0}, "replay.fraction must let rows of source hindsight be drawn"),
    (HINDSIGHT | {"replay.mode": "observe"}, "replay.mode must be train when replay.hindsight.enable is true"),
    (
        HINDSIGHT | POOL | {"replay.unit": "task"},
        "replay.unit must be any when replay.hindsight.enable is true, got task",
    ),
    (HINDSIGHT | {"replay.baseline": "shared"}, "replay.baseline must be stored when replay.hindsight.enable is true"),
    (HINDSIGHT | {"replay.retire_solved": 1.0}, "retire_solved must be null when replay.hindsight.enable is true"),
    (HINDSIGHT | {"replay.hindsight.enable": False}, "hindsight.enable must be true when replay.sources names"),
    ({"engine.serve": True}, "rollout.engine must be vllm when engine.serve is true, got local."),
    (SERVE | URLS, r"engine.urls must be \[\] when engine.serve is true, got \['http://127.0.0.1:8000'\]."),
    (URLS | {"engine.options": ["--x"]}, r"engine.options must be empty when engine.serve is false, got \['--x'\]."),
    (SERVE | {"collection.by": "workers"}, "collection.by must be loop when engine.serve is true, got workers."),
    *(({"replay.attach": {name: "x"}}, "replay.attach must name sources") for name in ("self", "../x")),
]


def nested(given: Given) -> dict[str, Any]:
    """Sections of settings that are given by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        *sections, name = key.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return found


@pytest.mark.parametrize(("given", "message"), CONFIGURATIONS)
def test_configuration_that_can_not_be_is_refused_by_name(given: Given, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate(nested(given))


def test_what_is_only_observed_needs_no_baseline() -> None:
    RunConfig.model_validate(nested({**TURN, "replay.fraction": 0.5, "replay.mode": "observe"}))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://me:hunter2@host/db", "replay.database must hold no password"),
        ("postgresql://host/db?password=hunter2", "replay.database must hold no password"),
        ("postgresql://me:hun@ter2@host/db", "got a malformed postgresql:// URL"),
        ("mysql://me:hunter2@host/db", r"got mysql://me:\*\*\*@host/db"),
        ("sqlite:///buffer.sqlite", "replay.database must be a URL with a whole path"),
    ],
)
def test_database_of_a_configuration_is_a_url_without_a_password(tmp_path: Path, url: str, message: str) -> None:
    (tmp_path / "named.yaml").write_text(f"replay: {{database: '{url}'}}")
    (tmp_path / "plain.yaml").touch()
    for file, overrides in (("named.yaml", ()), ("plain.yaml", (f"replay.database={url}",))):
        with pytest.raises(UserError, match=message) as refused:
            load_config(tmp_path / file, overrides)
        assert "ter2" not in str(refused.value)


REDACTOR = """
def fail(messages):
    raise ValueError("no idea")

def number(messages):
    return 3
"""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss.replay.objective": "HERE/no.py:f"}, "loss.replay.objective must name a file that exists, got .*no.py"),
        (
            {"replay.redact": "HERE/hide.py:fial"},
            r"replay.redact must name a function of .*'fial'. Did you mean fail\?",
        ),
        ({"replay.attach": {"x": "nowhere"}}, "database must be an existing file, got nothing at nowhere"),
        ({"replay.attach": {"x": "MODEL"}}, "database must be"),
        (
            {"replay.database": "postgresql+psycopg:///x?host=/nowhere"},
            "must be a PostgreSQL database that can be reached",
        ),
        (
            {**TURN, "replay.fraction": 0.0},
            "must be trajectory when the environment has no turn_rewards, got turn with",
        ),
        (HINDSIGHT, "replay.hindsight.enable must be false .*Parity. Write def achieved"),
    ],
)
def test_start_that_can_not_be_is_refused_and_leaves_no_run(
    tmp_path: Path, qwen2: Path, given: Given, message: str
) -> None:
    (tmp_path / "hide.py").write_text(REDACTOR)
    named = {key: _placed(value, tmp_path, qwen2) for key, value in given.items()}
    with pytest.raises((UserError, ReplayError), match=message):
        train(small_config(tmp_path / "runs", qwen2, **nested(named)), display=SilentDisplay())
    assert not (tmp_path / "runs").exists() or list((tmp_path / "runs").iterdir()) == []


def _placed(value: Any, here: Path, model: Path) -> Any:
    if isinstance(value, dict):
        return {name: _placed(inner, here, model) for name, inner in value.items()}
    return value.replace("HERE", str(here)).replace("MODEL", str(model)) if isinstance(value, str) else value


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"replay.redact": "HERE/hide.py:fail"},
            "redact must take every trajectory's messages, got ValueError: no idea",
        ),
        ({"replay.redact": "HERE/hide.py:number"}, "replay.redact must return messages or None, got int"),
        (
            {"environment.name": f"{GOALS}:Confused", "replay.shortfall": "shrink", **HINDSIGHT},
            "Confused.achieved must return a list of Achieved, each with a first_turn of",
        ),
        (
            {"environment.name": PARITY.replace("Parity", "NotANumber")},
            r"NotANumber\.reward must return a finite number, got nan",
        ),
    ],
)
def test_code_that_gives_what_it_must_not_ends_the_run_in_one_line(
    tmp_path: Path, qwen2: Path, given: Given, message: str
) -> None:
    (tmp_path / "hide.py").write_text(REDACTOR)
    named = {key: _placed(value, tmp_path, qwen2) for key, value in given.items()}
    with pytest.raises(UserError, match=message) as refused:
        train(small_config(tmp_path / "runs", qwen2, **nested(named)), display=SilentDisplay())
    assert "\n" not in str(refused.value)
