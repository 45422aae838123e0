"""Who collects: what workers can't do, and what a loss can't learn from, is refused before a run begins."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from agentloop.config import RunConfig

ENGINE = {"rollout": {"engine": "vllm"}, "engine": {"urls": ["http://a:1"]}}


def by_workers(collection: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    return {**ENGINE, **sections, "collection": {"by": "workers", **(collection or {})}}


def refusal(given: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as refused:
        RunConfig.model_validate(given)
    return str(refused.value)


def test_the_loop_collects_unless_workers_are_asked_for() -> None:
    assert RunConfig().collection.by == "loop"
    assert RunConfig.model_validate(by_workers()).collection.max_staleness == 0


@pytest.mark.parametrize(("key", "value"), [("max_staleness", 1), ("samples_per_insert", 4.0)])
def test_a_loop_that_is_to_run_ahead_of_itself_is_refused(key: str, value: float) -> None:
    given = {"collection": {key: value}}
    assert f"collection.{key} must be left out when collection.by is loop, got {value}" in refusal(given)


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"rollout": {"engine": "local"}, "engine": {}}, "rollout.engine must be vllm"),
        ({"algorithm": "remax"}, "algorithm must be grpo when collection.by is workers, got remax"),
        ({"rollout": {"engine": "vllm", "dynamic_sampling_rounds": 2}}, "rollout.dynamic_sampling_rounds must be 0"),
        ({"reward": {"model": {"path": "judge"}}}, "reward.model.path must be null"),
        (
            {"tasks": {"curriculum": "learnability"}, "environment": {"task_pool": 64}},
            "tasks.curriculum must be none",
        ),
        ({"replay": {"redact": "mine.py:redact"}}, "replay.redact must be null"),
    ],
)
def test_what_workers_cannot_do_is_refused_by_name(sections: dict[str, Any], text: str) -> None:
    assert text in refusal(by_workers(**sections))


@pytest.mark.parametrize("objective", ["reinforce", "gpg", "surrogate"])
def test_an_objective_that_nothing_bounds_is_refused_for_rows_of_an_earlier_policy(objective: str) -> None:
    fresh = {"objective": objective, "anchor": "behavior"}
    refused = refusal(by_workers({"max_staleness": 1}, loss={"fresh": fresh}))
    assert "loss.fresh.objective must be one that stays near the policy that sampled" in refused
    weighed = {"objective": objective, "correction": {"kind": "truncate", "ratio_high": 2.0}}
    assert RunConfig.model_validate(by_workers({"max_staleness": 1}, loss={"fresh": weighed}))
    assert RunConfig.model_validate(by_workers(loss={"fresh": fresh}))


def test_ratios_to_another_policy_than_the_one_that_sampled_are_refused() -> None:
    assert "loss.fresh.anchor must be behavior when collection.max_staleness is above 0 (2)" in refusal(
        by_workers({"max_staleness": 2})
    )
    assert RunConfig.model_validate(by_workers({"max_staleness": 2}, loss={"fresh": {"anchor": "behavior"}}))


def test_going_on_with_replay_needs_room_and_rows() -> None:
    behavior = {"loss": {"fresh": {"anchor": "behavior"}}, "replay": {"fraction": 0.25}}
    refused = refusal(by_workers({"samples_per_insert": 4.0}, **behavior))
    assert "collection.max_staleness must be at least 1 when collection.samples_per_insert is set" in refused
    asked = {"samples_per_insert": 4.0, "max_staleness": 1}
    assert RunConfig.model_validate(by_workers(asked, **behavior))
    assert "replay.fraction must be above 0 when collection.samples_per_insert is set" in refusal(
        by_workers(asked, **{**behavior, "replay": {}})
    )
    by_task = {"fraction": 0.25, "unit": "trajectory"}
    pool = {"environment": {"task_pool": 64}}
    assert "replay.unit must be any or group when collection.samples_per_insert is set" in refusal(
        by_workers(asked, **{**behavior, "replay": by_task}, **pool)
    )
    observed = {"fraction": 0.25, "mode": "observe"}
    assert "replay.mode must be train when collection.samples_per_insert is set" in refusal(
        by_workers(asked, **{**behavior, "replay": observed})
    )
