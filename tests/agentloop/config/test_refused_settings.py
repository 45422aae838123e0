"""Settings that can't be meant, one line per rule: what a configuration says, and what it is told."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from agentloop.config import RunConfig

Sections = dict[str, Any]
VLLM: Sections = {"rollout": {"engine": "vllm"}, "engine": {"urls": ["http://a:1"]}}
WORKERS: Sections = {**VLLM, "collection": {"by": "workers"}}
AHEAD: Sections = {**VLLM, "collection": {"by": "workers", "max_staleness": 1}}
GOING_ON: Sections = {
    **VLLM,
    "collection": {"by": "workers", "max_staleness": 1, "samples_per_insert": 4.0},
    "loss": {"fresh": {"anchor": "behavior"}},
    "replay": {"fraction": 0.25},
}
ROWS: Sections = {
    "environment": {"name": "rows", "tools": ["tools.py:add"]},
    "tasks": {"data": "rows.jsonl"},
    "reward": {"functions": ["judge.py:right", {"function": "judge.py:brief", "weight": 0.1}]},
}
POOL: Sections = {"environment": {"task_pool": 50}, "batch": {"trajectories": 32, "group_size": 8, "mini_batch": 16}}
HINT: Sections = {"context": {"strategy": "hint"}}
TRAINED: Sections = {"context": {"authors": [{"name": "human_edit", "action": True, "trained": True}]}}
UNTRAINED: Sections = {"context": {"authors": [{"name": "planner", "action": True}]}}
MASK = {"kind": "mask", "ratio_high": 2.0}


def merged(base: Sections, more: Sections) -> Sections:
    """`more` over `base`, key by key of each section."""
    return base | {name: {**base.get(name, {}), **s} if isinstance(s, dict) else s for name, s in more.items()}


def rows_without(section: str, **values: Any) -> Sections:
    return merged(ROWS, {section: values})


REFUSED: list[tuple[Sections, str]] = [
    # collection
    (
        {"collection": {"max_staleness": 1}},
        "collection.max_staleness must be left at 0 when collection.by is loop, got 1",
    ),
    (merged(WORKERS, {"rollout": {"engine": "local"}}), "rollout.engine must be vllm"),
    ({**WORKERS, "algorithm": "remax"}, "algorithm must be grpo when collection.by is workers, got remax"),
    (merged(WORKERS, {"rollout": {"dynamic_sampling_rounds": 2}}), "rollout.dynamic_sampling_rounds must be 0"),
    (merged(WORKERS, {"reward": {"model": {"path": "judge"}}}), "reward.model.path must be null"),
    (merged({**WORKERS, **POOL}, {"tasks": {"curriculum": "learnability"}}), "tasks.curriculum must be none"),
    (merged(WORKERS, {"replay": {"redact": "mine.py:redact"}}), "replay.redact must be null"),
    *(
        (
            {**AHEAD, "loss": {"fresh": {"objective": name, "anchor": "behavior"}}},
            "loss.fresh.objective must be one that stays near the policy that sampled",
        )
        for name in ("reinforce", "gpg", "surrogate")
    ),
    (AHEAD, "loss.fresh.anchor must be behavior when collection.max_staleness is above 0 (1)"),
    (merged(GOING_ON, {"collection": {"max_staleness": 0}}), "collection.max_staleness must be at least 1 when coll"),
    (merged(GOING_ON, {"replay": {"fraction": 0}}), "replay.fraction must be above 0 when collection.samples_per_ins"),
    (merged(GOING_ON, {**POOL, "replay": {"unit": "trajectory"}}), "replay.unit must be any or group when collection"),
    (merged(GOING_ON, {"replay": {"mode": "observe"}}), "replay.mode must be train when collection.samples_per_insert"),
    # engine
    ({"rollout": {"engine": "vllm"}}, "engine.urls must name at least one server when rollout.engine is vllm"),
    ({"engine": VLLM["engine"]}, "engine.urls must be empty when rollout.engine is local, got http://a:1"),
    (merged(VLLM, {"engine": {"urls": ["http://a:1", "http://a:1/"]}}), "engine.urls must name each server once"),
    *(
        ({"engine": {"urls": [url]}}, "must be http://HOST:PORT or https://HOST:PORT")
        for url in ("a:8000", "ftp://a", "http://", "http://a?x=1", "http://a:port", "")
    ),
    ({"engine": {"urls": ["http://me:hidden@a:8000"]}}, "engine.urls must hold no user and no password"),
    # environments of rows
    (rows_without("environment", name="lookup_chain"), "environment.tools must be left out unless environment.name is"),
    (rows_without("tasks", data=None), "tasks.data must name rows when environment.name is rows, got null"),
    (rows_without("reward", functions=[]), "reward.functions must name a function when environment.name is rows"),
    (rows_without("reward", environment=0.5), "reward.environment must be left at 1 when environment.name is rows"),
    # parts that are off
    ({"loss": {"norm_length": 7.0}}, "loss.norm_length must be null when loss.aggregation is token-mean, got 7. Remov"),
    ({"loss": {"aggregation": "seq-mean-token-sum-norm"}}, "loss.norm_length must be a number of tokens"),
    (
        {"kl": {"loss_gradient": "importance", "loss_estimator": "k2"}},
        "kl.loss_estimator must be k1 or k3 when kl.loss_gradient is importance",
    ),
    ({"kl": {"reward_coef": 0.1, "horizon": 500}}, "kl.horizon must be left at 10000 when kl.target is null"),
    ({"kl": {"target": 0.1}}, "kl.reward_coef must be > 0 when kl.target is set"),
    (
        {"kl": {"target": 0.1, "reward_coef": 0.1, "horizon": 100}},
        "kl.horizon must be at least batch.trajectories (128)",
    ),
    ({"reward": {"on_error": "drop"}}, "reward.on_error must be left at stop when reward.functions is []"),
    ({"tasks": {"curriculum_decay": 0.9}}, "tasks.curriculum_decay must be left at 0.5 when tasks.curriculum is none"),
    ({"critic": {"gamma": 0.9}}, "critic.gamma must have its default when algorithm is grpo"),
    (
        merged(POOL, {"algorithm": "ppo", "replay": {"complete_zero_variance": True}}),
        "replay.complete_zero_variance must be false when algorithm is ppo",
    ),
    ({"algorithm": "ppo", "critic": {"value_coef": 0.1}}, "critic.value_coef must be 0 when critic.backbone is own"),
    (
        {"algorithm": "ppo", "loss": {"fresh": {"correction": "v_trace"}}},
        "loss.fresh.correction.kind must not be v_trace when algorithm is ppo",
    ),
    (
        {"optimizer": {"name": "sgd", "betas": [0.8, 0.9]}},
        "optimizer.betas must be left at [0.9, 0.95] when optimizer.name is sgd, got [0.8, 0.9]. It would change",
    ),
    ({"optimizer": {"momentum": 0.5}}, "optimizer.momentum must be left at 0.95 when optimizer.name is adamw"),
    (
        {"algorithm": "ppo", "critic": {"optimizer": {"name": "adafactor", "momentum": 0.5}}},
        "critic.optimizer.momentum must be left at 0.95 when critic.optimizer.name is adafactor",
    ),
    # tokens of unknown behavior
    (
        {**HINT, "loss": {"fresh": {"anchor": "behavior"}}},
        "loss.fresh.anchor must be old when context.strategy is hint",
    ),
    ({**HINT, "loss": {"fresh": {"correction": MASK}}}, "loss.fresh.correction.kind must be none when context.strateg"),
    ({**HINT, "replay": {"fraction": 0.5}}, "loss.replay.anchor must be old when context.strategy is hint"),
    (
        {**HINT, "replay": {"schedule": {"shape": "linear", "final": 0.5}}},
        "loss.replay.anchor must be old when context.strategy is hint",
    ),
    ({**HINT, "kl": {"reward_coef": 0.1}}, "kl.reward_coef must be 0 when context.strategy is hint"),
    (
        {**TRAINED, "replay": {"fraction": 0.5}},
        "loss.replay.anchor must be old when context.authors has a trained author, 'human_edit', whose log-probs count "
        "as missing, got behavior. Set loss.replay.anchor: old, or loss.replay.missing_log_probs.",
    ),
    (
        {**UNTRAINED, "kl": {"reward_coef": 0.1}},
        "kl.reward_coef must be 0 when context.authors has an action author, 'planner', whose log-probs",
    ),
    # what is drawn
    (
        {"replay": {"schedule": {"shape": "linear"}}},
        "replay.schedule.final must be a share when shape is linear, got n",
    ),
    ({"replay": {"schedule": {"shape": "step"}}}, "replay.schedule.steps must hold a pair"),
    (
        {"replay": {"schedule": {"final": 0.1}}},
        "replay.schedule.final must be left out when replay.schedule.shape is c",
    ),
    (
        {"replay": {"schedule": {"shape": "step", "steps": [[0.5, 0.1], [0.2, 0.3]]}}},
        "replay.schedule.steps must have ascending places",
    ),
    (
        {"replay": {"schedule": {"shape": "linear", "final": 0.1, "begin": 0.5, "end": 0.5}}},
        "replay.schedule.end must be above begin",
    ),
    ({"replay": {"schedule": {"shape": "linear", "final": 0.1, "end": 20}}}, "replay.schedule.over must be iterations"),
    ({"replay": {"unit": "trajectory"}}, "environment.task_pool must be a number when replay.unit is"),
    ({"replay": {"complete_zero_variance": True}}, "environment.task_pool must be a number when"),
    (
        merged(POOL, {"replay": {"unit": "group", "successful_only": False, "per_task": 7}}),
        "replay.per_task must be at least batch.group_size (8) when replay.unit is group",
    ),
    (merged(POOL, {"replay": {"unit": "group"}}), "replay.successful_only must be false when replay.unit is group"),
    (
        merged(POOL, {"replay": {"unit": "trajectory"}, "batch": {"trajectories": 33}}),
        "batch.trajectories must be a multiple of batch.group_size (8",
    ),
    (
        merged(POOL, {"replay": {"unit": "task", "task_members": 9}}),
        "replay.task_members must be a number from 1 to batch.group_size (8)",
    ),
    (
        merged(POOL, {"replay": {"unit": "task", "task_members": 3, "fraction": 0.5}}),
        "replay.task_members must be at least replay.fraction x batch.group_size (0.5 x 8), got 3",
    ),
    ({"replay": {"task_members": 3}}, "replay.task_members must be left out when replay.unit is any, got 3"),
    ({"replay": {"sources": {"self": 0.7, "teacher": 0.2}}}, "replay.sources must have shares above 0 that sum to 1"),
    (
        merged(POOL, {"replay": {"complete_zero_variance": True, "mode": "observe"}}),
        "replay.complete_zero_variance must be false when replay.mode is observe",
    ),
    (
        merged(POOL, {"replay": {"complete_zero_variance": True, "unit": "group", "successful_only": False}}),
        "replay.complete_zero_variance must be false when replay.unit is group",
    ),
    (
        {"replay": {"sampler": "sucess"}},
        "replay.sampler must be a built-in sampler or path/to/file.py:ClassName, got 'sucess'",
    ),
    (
        {"replay": {"sampler_options": {"half_life": 3}}},
        "replay.sampler_options must hold options of success, got 'half_life'",
    ),
    (
        {"replay": {"sampler": "recency", "sampler_options": {"half_life": 0}}},
        "half_life must be greater than 0, got 0",
    ),
    ({"replay": {"allow_mismatch": ["tokeniser"]}}, "must name what may differ, got 'tokeniser'. Did you mean token"),
    (
        {"replay": {"sampler": "entropy", "unit": "group", "successful_only": False}},
        "replay.sampler must weigh rows when replay.unit is group",
    ),
    # arguments of a template
    ({"context": {"stop_strings": [""]}}, "context.stop_strings must hold texts of at least one character"),
    ({"context": {"template_args": {"enable-thinking": 1}}}, "context.template_args must have names of variables"),
    ({"context": {"template_args": {"day": {1}}}}, "context.template_args.day must be a JSON value"),
]


@pytest.mark.parametrize(("sections", "message"), REFUSED)
def test_settings_that_can_not_be_meant_are_refused_by_name(sections: Sections, message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)) as refused:
        RunConfig.model_validate(sections)
    assert "hidden" not in str(refused.value)


WEIGHED = {"objective": "gpg", "correction": {"kind": "truncate", "ratio_high": 2.0}}


@pytest.mark.parametrize(
    "sections",
    [
        WORKERS,
        GOING_ON,
        ROWS,
        {**AHEAD, "loss": {"fresh": WEIGHED}},
        {**AHEAD, "loss": {"fresh": {"anchor": "behavior"}}},
        {**WORKERS, "loss": {"fresh": {"objective": "gpg", "anchor": "behavior"}}},
        {"loss": {"fresh": {"correction": "v_trace"}}},
        {"kl": {"loss_coef": 0.0, "loss_estimator": "k1", "loss_gradient": "importance"}},  # a sweep through zero
        HINT,
        *(
            {**HINT, "replay": {"fraction": 0.5}, "loss": {"replay": way}}
            for way in ({"missing_log_probs": "recompute"}, {"objective": "bc"}, {"anchor": "old"})
        ),
        {**TRAINED, "replay": {"fraction": 0.5}, "loss": {"replay": {"anchor": "old"}}},
        {**UNTRAINED, "replay": {"fraction": 0.5}},
    ],
)
def test_settings_beside_those_are_taken(sections: Sections) -> None:
    RunConfig.model_validate(sections)


def test_settings_are_read_into_what_they_mean() -> None:
    urls = ["http://127.0.0.1:8000/", "https://gpu:443/engine"]
    config = RunConfig.model_validate(merged(VLLM, {"engine": {"urls": urls}}))
    assert config.engine.urls == ("http://127.0.0.1:8000", "https://gpu:443/engine")
    functions = RunConfig.model_validate(ROWS).reward.functions
    assert [(row.function, row.weight, row.name) for row in functions] == [
        ("judge.py:right", 1.0, "right"),
        ("judge.py:brief", 0.1, "brief"),
    ]
