"""Settings that can't be meant, a line for each rule: what a configuration says, and how it is refused."""

from typing import Any

import pytest

from agentloop.config import RunConfig, conflicts
from agentloop.config.config_file import load_plain
from agentloop.config.keys import schema_entries
from tests.fakes.refusals import refusal_of

VLLM = "rollout.engine=vllm; engine.urls=[http://a:1]; "
WORKERS = f"{VLLM}collection.by=workers; "
AHEAD = f"{WORKERS}collection.max_staleness=1; "
SERVE = "rollout.engine=vllm; engine.serve=true; "
ROWS = (
    "environment={name: rows, tools: [tools.py:add]}; tasks.data=rows.jsonl; "
    "reward.functions=[judge.py:right, {function: judge.py:brief, weight: 0.1}]; "
)
POOL = "environment.task_pool=50; batch={trajectories: 32, group_size: 8, mini_batch: 16}; "
HINT, PPO, TURN = "context.strategy=hint; ", "algorithm=ppo; ", "advantage.credit=turn; "
CRITIC, UNKNOWN = "critic.optimizer.", "loss.replay.missing_log_probs="
CLIP = "context.strategy=clip_tool_results; context.options="
FUNCTION, ROUNDS = "advantage.function=a.py:f; ", "rollout.dynamic_sampling_rounds=1; "
TRAINED = "context.authors=[{name: human_edit, action: true, trained: true}]; "
UNTRAINED = "context.authors=[{name: planner, action: true}]; "
GROUP = f"{POOL}replay.unit=group; replay.successful_only=false; "
HINDSIGHT = "replay={fraction: 0.5, hindsight: {enable: true}, sources: {hindsight: 0.5, self: 0.5}}; "

REFUSED = [
    # without effect
    ("batch.group_size=1", "batch.group_size must be above 1 when algorithm is grpo, by which members of a group are"),
    ("collection.max_staleness=1", "collection.max_staleness must be left at 0 when collection.by is loop, got 1. It"),
    ("advantage.turn_gamma=0.9", "advantage.turn_gamma must be left at 1.0 when advantage.credit is trajectory, got "),
    ("critic.gamma=0.9", "critic.gamma must be left at 1.0 when algorithm is grpo, got 0.9. It would change nothing"),
    (f"{VLLM}engine.options=[--x]", 'engine.options must be left at [] when engine.serve is false, got ["--x"]'),
    ("engine.urls=[http://a:1]", "engine.urls must be left at [] when rollout.engine is local"),
    ("engine.serve=true", "engine.serve must be left at false when rollout.engine is local, got true"),
    (f"{ROWS}environment.name=lookup_chain", "environment.tools must be left at [] when environment.name is lookup_c"),
    ("lora.alpha=16", "lora.alpha must be left at 32 when lora.rank is 0"),
    ("loss.hinted={}", "loss.hinted must be left at null when context.strategy is linear"),
    ("loss.norm_length=7.0", "loss.norm_length must be left at null when loss.aggregation is token-mean, got 7.0"),
    ("optimizer.momentum=0.5", "optimizer.momentum must be left at 0.95 when optimizer.name is adamw"),
    (f"{PPO}{CRITIC}name=adamw; {CRITIC}momentum=0.5", f"{CRITIC}momentum must be left at 0.95 when {CRITIC}name"),
    ("replay.weight=2", "replay.weight must be left at 1.0 when loss.normalise is joint, got 2.0"),
    ("reward.on_error=drop", "reward.on_error must be left at stop when reward.functions is [], got drop"),
    ("tasks.split=x", "tasks.split must be left at null when tasks.data is null, got x"),
    ("tasks.data=x.jsonl; tasks.subset=main", "tasks.subset must be left at null when tasks.data is x.jsonl, got main"),
    ("environments.a={share: 1}; environment.tools=[a.py:f]", "environment.tools must be left at [] when environments"),
    # excluded by another
    (f"{FUNCTION}algorithm=opo", "algorithm must be grpo when advantage.function is a.py:f, got opo. The function "),
    (f"{PPO}advantage.normalise_batch=scale", "advantage.normalise_batch must be none when algorithm is ppo"),
    (FUNCTION + TURN, "advantage.credit must be trajectory when advantage.function is a.py:f, g"),
    (PPO + TURN, "advantage.credit must be trajectory when algorithm is ppo, got turn"),
    (f"algorithm=reinforce; {ROUNDS}", "rollout.dynamic_sampling_rounds must be 0 when algorithm is reinforce, got 1"),
    (TURN + ROUNDS, "rollout.dynamic_sampling_rounds must be 0 when advantage.credit is turn, got 1"),
    (f"{POOL}{ROUNDS}replay.unit=trajectory", "dynamic_sampling_rounds must be 0 when replay.unit is trajectory"),
    (f"{PPO}replay.baseline=split", "replay.baseline must be stored when algorithm is ppo, got split"),
    (f"{FUNCTION}replay.baseline=fresh_only", "replay.baseline must be stored, shared or split when advantage.functio"),
    (f"{WORKERS}rollout.engine=local; engine.urls=[]", "rollout.engine must be vllm when collection.by is workers"),
    (f"{WORKERS}algorithm=remax", "algorithm must be another one when collection.by is workers, got remax"),
    (f"{WORKERS}{ROUNDS}", "rollout.dynamic_sampling_rounds must be 0 when collection.by is workers, got 1"),
    (f"{WORKERS}replay.redact=mine.py:redact", "replay.redact must be null when collection.by is workers"),
    (f"{SERVE}collection.by=workers", "collection.by must be loop when engine.serve is true, got workers"),
    (f"{VLLM}{SERVE}", 'engine.urls must be [] when engine.serve is true, got ["http://a:1"]'),
    ("evaluation.samples=2; evaluation.temperature=0", "evaluation.samples must be 1 when evaluation.temperature is 0"),
    ("model.dtype=bfloat16; compute.autocast=bfloat16", "compute.autocast must be auto or none when model.dtype is bf"),
    ("kl.loss_gradient=importance; kl.loss_estimator=k2", "kl.loss_estimator must be k1 or k3 when kl.loss_gradient i"),
    ("loss.aggregation=seq-mean-token-sum-norm", "loss.norm_length must be given when loss.aggregation is seq-mean-to"),
    ("loss.replay={anchor: old, objective: exgrpo}", "loss.replay.anchor must be behavior when loss.replay.objective"),
    ("loss.replay.correction=truncate", "loss.replay.correction.kind must be none when loss.replay.anchor is behavior"),
    (f"{ROWS}tasks.data=null", "tasks.data must be given when environment.name is rows, got null"),
    (f"{ROWS}reward.functions=[]", "reward.functions must be given when environment.name is rows, got []"),
    (f"{ROWS}reward.environment=0.5", "reward.environment must be 1.0 when environment.name is rows, got 0.5"),
    (f"{POOL}tasks.data=x.jsonl", "environment.task_pool must be unlimited when tasks.data is x.jsonl, got 50"),
    # more than two, or numbers that are compared
    (f"{TURN}replay.fraction=0.5", "replay.baseline must not be stored when advantage.credit is turn"),
    ("replay.fraction=0.5; replay.baseline=shared", "environment.task_pool must be a number when replay.baseline is s"),
    ("tasks.shuffle=false", "environment.task_pool must be a number when tasks.shuffle is false"),
    ("tasks={data: x.jsonl, held_out: train}", "tasks.held_out must be another split than the one that is trained on"),
    *(
        (f"{AHEAD}loss.fresh={{objective: {name}, anchor: behavior}}", "loss.fresh.objective must be one that stays ne")
        for name in ("reinforce", "gpg", "surrogate")
    ),
    (AHEAD, "loss.fresh.anchor must be behavior when collection.max_staleness is above 0 (1)"),
    ("rollout.engine=vllm", "engine.urls must name at least one server when rollout.engine is vllm"),
    (f"{VLLM}engine.urls=[http://a:1, http://a:1/]", "engine.urls must name each server once"),
    *(
        (f"engine.urls=['{url}']", "each of engine.urls must be http://HOST:PORT or https://")
        for url in ("a:8000", "ftp://a", "http://", "http://a?x=1", "http://a:port", "")
    ),
    (f"{VLLM}engine.urls=['http://me:hunter2@a:8000']", "engine.urls must hold no user and no password, got a URL wi"),
    ("loss.fresh.correction={kind: mask, ratio_low: 3}", "loss.fresh.correction must have ratio_low of at most ratio_"),
    (f"{HINT}loss.fresh.anchor=behavior", "loss.fresh.anchor must be old when context.strategy is hint"),
    (f"{HINT}loss.fresh.correction=mask", "loss.fresh.correction.kind must be none when context.strategy is hint"),
    (f"{HINT}replay.fraction=0.5", "loss.replay.anchor must be old when context.strategy is hint"),
    (f"{HINT}replay.schedule={{shape: linear, final: 0.5}}", "loss.replay.anchor must be old when context.strategy is"),
    (f"{HINT}kl.reward_coef=0.1", "kl.reward_coef must be 0 when context.strategy is hint"),
    (f"{TRAINED}replay.fraction=0.5", "loss.replay.anchor must be old when context.authors has a trained author, 'hum"),
    (f"{UNTRAINED}kl.reward_coef=0.1", "kl.reward_coef must be 0 when context.authors has an action author, 'planner'"),
    # what is drawn
    ("replay.schedule={shape: linear}", "replay.schedule.final must be a share when shape is linear, got n"),
    ("replay.schedule={shape: step}", "replay.schedule.steps must hold a pair"),
    ("replay.schedule={final: 0.1}", "replay.schedule.final must be left out when replay.schedule.shape is c"),
    ("replay.schedule={shape: step, steps: [[0.5, 0.1], [0.2, 0.3]]}", "replay.schedule.steps must have ascending pla"),
    ("replay.schedule={shape: linear, final: 0.1, begin: 0.5, end: 0.5}", "replay.schedule.end must be above begin"),
    ("replay.schedule={shape: linear, final: 0.1, end: 20}", "replay.schedule.end must be a number from 0 to 1"),
    ("replay.unit=trajectory", "environment.task_pool must be a number when replay.unit is"),
    (f"{GROUP}replay.per_task=7", "replay.per_task must be at least batch.group_size (8) when replay.unit is group"),
    (f"{POOL}replay.unit=group", "replay.successful_only must be false when replay.unit is group"),
    (f"{POOL}replay.unit=trajectory; batch.trajectories=33", "batch.trajectories must be a multiple of batch.group_si"),
    (f"{POOL}replay={{unit: task, task_members: 9}}", "replay.task_members must be a number from 1 to batch.group_siz"),
    (
        f"{POOL}replay={{unit: task, task_members: 3, fraction: 0.5}}",
        "replay.task_members must be at least replay.fraction x batch.group_size (0.5 x 8), got 3",
    ),
    ("replay.task_members=3", "replay.task_members must be left out when replay.unit is any, got 3"),
    ("replay.sources={self: 0.7, teacher: 0.2}", "replay.sources must have shares above 0 that sum to 1"),
    ("replay.sampler=sucess", "replay.sampler must be a built-in sampler or path/to/file.py:ClassName, got 'sucess'"),
    ("replay.sampler_options={half_life: 3}", "replay.sampler_options must hold options of success, got 'half_life'"),
    ("replay.allow_mismatch=[tokeniser]", "must name what may differ, got 'tokeniser'. Did you mean token"),
    (f"{GROUP}replay.sampler=entropy", "replay.sampler must weigh rows when replay.unit is group"),
    (f"{HINDSIGHT}replay.sources={{self: 1.0}}", "replay.sources must let rows of source hindsight be drawn"),
    (f"{HINDSIGHT}replay.fraction=0", "replay.fraction must let rows of source hindsight be drawn"),
    (f"{HINDSIGHT}replay.mode=observe", "replay.mode must be train when replay.hindsight.enable is true"),
    (f"{HINDSIGHT}{POOL}replay.unit=task", "replay.unit must be any when replay.hindsight.enable is true, got task"),
    (f"{HINDSIGHT}replay.baseline=shared", "replay.baseline must be stored when replay.hindsight.enable is true"),
    (f"{HINDSIGHT}replay.hindsight.enable=false", "replay.hindsight.enable must be true when replay.sources names hi"),
    *((f"replay.attach={{{name}: x}}", "replay.attach must name sources in [A-Za-z0-9_]") for name in ("self", "../x")),
    *(
        (f"replay.database='{url}'", f"replay.database must {rule}")
        for url, rule in {
            "postgresql://me:hunter2@host/db": "hold no password",
            "postgresql://host/db?password=hunter2": "hold no password",
            "postgresql://me:hun@ter2@host/db": "be a path, sqlite:///PATH or postgresql+psycopg://USER@HOST/NAME",
            "mysql://me:hunter2@host/db": "be a path, sqlite:///PATH or postgresql+psycopg://USER@HOST/NAME",
            "sqlite:///buffer.sqlite": "be a URL with a whole path",
        }.items()
    ),
    # losses, which are unions
    (
        "loss.fresh.objective=ppo",
        "loss.fresh.objective must be one of bc, cispo, dppo_kl, dppo_tv, exgrpo, gmpo, gpg, gspo, luffy, ppo_clip, "
        "reinforce, sapo, surrogate, topr, path/to/file.py:function, alone or with options, got 'ppo'.",
    ),
    ("loss.fresh={objective: {clip_high: 0.6}}", "loss.fresh.objective must be one of bc, cispo, "),
    ("loss.replay.objective={name: gspo, clip_low: 2}", "loss.replay.objective.clip_low must be less than 1, got 2."),
    ("loss.fresh.correction={kind: truncate, ratio_low: 1}", "loss.fresh.correction.ratio_low must be a known key"),
    ("loss.fresh={correction: {ratio_high: 2}}", "loss.fresh.correction must be one of none, truncate, mask, rejecti"),
    ("loss.hinted={objective: {name: bc, coef: 0}}", "loss.hinted.objective.coef must be greater than 0, got 0."),
    # contexts
    ("context={strategy: memory, options: {budgt: 3}}", "must be options of strategy memory, got 'budgt'. Did you me"),
    ("context.options={budget: 3}", "got 'budget'. There is none."),
    ("context.strategy=sliding_window", "context.options must give 'budget', which strategy sliding_window needs"),
    ("context={strategy: sliding_window, options: {budget: 0}}", "context.options.budget must be at least 1 token, go"),
    (f"{CLIP}{{budget: 9, keep_chars: few}}", "context.options.keep_chars must be a valid integer, got 'few'."),
    ("context.strategy=slidingwindow", "context.strategy must be linear, linear_think, sliding_window, "),
    ("context.parser=hermess", "context.parser must be a built-in parser or path/to/file.py:ClassName, got 'hermess'."),
    ("context.authors=[{name: llm}]", "context.authors must have names of their own, got 'llm' twice."),
    ("context.authors=[{name: demonstration, action: true}]", "must have names of their own, got 'demonstration' twic"),
    ("context.authors=[{name: judge, trained: true}]", "context.authors.judge must be an action author for trained"),
    ("context.authors=[{name: x, action: true, shown: false}]", "context.authors must show an author with action: tr"),
    ("context.authors=[{name: judge, traned: true}]", "context.authors must be a list of mappings, got"),
    ("context.stop_strings=['']", "context.stop_strings must hold texts of at least one character"),
]


def loaded(text: str) -> RunConfig:
    return load_plain({}, [part for part in text.split("; ") if part])


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_settings_that_can_not_be_meant_are_refused_by_name(given: str, message: str) -> None:
    said = refusal_of(loaded, given)
    assert message in said
    assert "ter2" not in said


def test_rules_are_about_keys_that_there_are() -> None:
    named = [key for keys, other, _ in conflicts.NO_EFFECT for key in (*keys.split(), other)]
    named += [key for key, _, other, *_ in conflicts.EXCLUDED for key in (key, other)]
    within = ("loss.hinted", "correction.kind", "objective.name")
    paths = {".".join(path) for path in schema_entries()}
    assert [key for key in named if key not in paths and not any(part in key for part in within)] == []


@pytest.mark.parametrize(
    "given",
    [
        WORKERS,
        ROWS,
        f"{AHEAD}loss.fresh={{objective: gpg, correction: {{kind: truncate, ratio_high: 2.0}}}}",
        f"{AHEAD}loss.fresh.anchor=behavior",
        f"{WORKERS}loss.fresh={{objective: gpg, anchor: behavior}}",
        "kl={loss_coef: 0.0, loss_estimator: k1, loss_gradient: importance}",  # a sweep through zero
        HINT,
        f"{HINT}replay.fraction=0.5; {UNKNOWN}recompute",
        f"{HINT}replay.fraction=0.5; loss.replay.objective=bc",
        f"{HINT}replay.fraction=0.5; loss.replay.anchor=old",
        f"{TRAINED}replay.fraction=0.5; loss.replay.anchor=old",
        f"{UNTRAINED}replay.fraction=0.5",
        f"{TURN}replay.fraction=0.5; replay.mode=observe",
    ],
)
def test_settings_beside_those_are_taken(given: str) -> None:
    loaded(given)


def test_settings_are_read_into_what_they_mean() -> None:
    config = loaded("rollout.engine=vllm; engine.urls=[http://127.0.0.1:8000/, https://gpu:443/engine]")
    assert config.engine.urls == ("http://127.0.0.1:8000", "https://gpu:443/engine")
    functions: list[Any] = [(row.function, row.weight, row.name) for row in loaded(ROWS).reward.functions]
    assert functions == [("judge.py:right", 1.0, "right"), ("judge.py:brief", 0.1, "brief")]
