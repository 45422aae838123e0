"""Evaluates a stored policy, or lets it play one episode for people to read."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from agentloop.config import RunConfig
from agentloop.config.config_file import is_config_file, load_config, load_plain, to_plain
from agentloop.config.seeds import derive_seed
from agentloop.engines.local.local_generator import LocalGenerator, StopStrings
from agentloop.environments import Environment, RunEnvironments, Task, open_tasks
from agentloop.environments.task_source import TaskSource
from agentloop.errors import UserError, needing
from agentloop.models.adapters import load_policy
from agentloop.models.backbone_passes import describe_types, on_its_device
from agentloop.models.loading import load_files
from agentloop.rollouts.actors import Actors, make_actors, stop_strings
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.episodes.run_episodes import run_episodes
from agentloop.rollouts.evaluation import Evaluated, EvaluationReport, category_of, evaluate, report
from agentloop.rollouts.first_prompts import RowCheck
from agentloop.rollouts.rewards import open_scorer
from agentloop.runs.checkpoint import seed_process
from agentloop.runs.display import showing_progress
from agentloop.runs.progress_bars import open_display
from agentloop.runs.run_folder import COMPLETE, RunFolder, complete_checkpoints, has_run, open_run_folder
from agentloop.runs.signals import graceful_stop
from context.messages import Message
from replay.locate import BEST, best_policy, newest_run_folder, split_best


class ServedModel(NamedTuple):
    """A model behind an OpenAI-compatible address, which replies in the policy's place."""

    url: str
    name: str
    key: str | None = None


class Asked(NamedTuple):
    """The choices for an evaluation that a command can make."""

    tasks: int | None = None
    """Held-out tasks; None: as many as configured, as for the samples."""
    samples: int | None = None
    by: str | None = None
    """The field of the payload with a task's category."""
    served: ServedModel | None = None


_AS_CONFIGURED = Asked()


def newest_trained_folder(runs: Path = Path("runs")) -> Path:
    """The folder with the newest checkpoint, of a run or of sft."""
    complete = list(runs.glob(f"*/checkpoints/*/{COMPLETE}"))
    if not complete:
        return newest_run_folder(runs)
    return max(complete, key=lambda mark: mark.stat().st_mtime_ns).parents[2]


def evaluate_run(
    run: Path,
    asked: Asked = _AS_CONFIGURED,
    *,
    policy: int | str | None = None,
    environment_changed: bool = False,
) -> EvaluationReport:
    """Evaluate a run's policy, with the tasks and seed of training, so that figures can be compared.

    `run` and `policy` are as for `named_policy`. Raises UserError where the environment's source has changed, unless
    `environment_changed`.
    """
    folder, made, weights = named_policy(run, policy)
    config = _with_sizes(folder.config, asked)
    environments, source = open_tasks(config, folder.environments, environment_changed=environment_changed)
    version = made if folder.environments else None  # sft has no policy versions
    whose = Evaluated(str(folder.path), version, str(weights), environments.name, environments.version)
    return _evaluate_policy(config, environments, source, (first_weights(folder), weights), whose, asked)


def evaluate_model(file: Path, overrides: Sequence[str] = (), asked: Asked = _AS_CONFIGURED) -> EvaluationReport:
    """Evaluate the model of a configuration on its held-out tasks, like the run would at its start."""
    config = _with_sizes(load_config(file, overrides), asked)
    if (model := config.model.path) is None:
        raise UserError(f"--model must be given where model.path of {file} is null, got neither. Add --model PATH.")
    environments, source = open_tasks(config)
    whose = Evaluated(model, None, model, environments.name, environments.version)
    return _evaluate_policy(config, environments, source, (model, None), whose, asked)


def _with_sizes(config: RunConfig, asked: Asked) -> RunConfig:
    values = to_plain(config)
    values["evaluation"] |= {name: getattr(asked, name) for name in ("tasks", "samples") if getattr(asked, name)}
    return load_plain(values, source="evaluate")


def _evaluate_policy(
    config: RunConfig,
    environments: RunEnvironments,
    source: TaskSource,
    weights: tuple[Path | str, Path | None],
    whose: Evaluated,
    asked: Asked,
) -> EvaluationReport:
    """Evaluate weights: `weights` is the place of the first model, and the place of those saved since, if any."""
    display = open_display(stderr=True)
    with graceful_stop(display.note, idle="stopped"), showing_progress(display):
        scorer = open_scorer(config, environments)
        if source.summary is not None:
            files = load_files(config, weights[0])
            source = RowCheck(config, environments, files, scorer, display.note, sides=("held-out",)).fitting(source)
        for task in source.held_out(config.evaluation.tasks) if asked.by is not None else ():
            category_of(task, asked.by)  # a mistaken field is refused before the model is loaded
        seed_process(config)
        note = display.note if asked.served is None else None  # the served model computes elsewhere
        actors = sampling_actors(config, environments, weights[0], saved=weights[1], note=note)
        if (served := asked.served) is not None:
            with needing("gateway", "--url"):
                from agentloop.gateway.text_upstream import TextUpstream
            model = TextUpstream(served.url, key=served.key, model=served.name, renderer=actors.renderer)
            actors = replace(actors, served=partial(model.play, temperature=config.evaluation.temperature))
            named = f"{served.name} at {served.url}"
            whose = replace(whose, run=named, policy_version=None, checkpoint=named)
        progress = partial(display.phase, "evaluate")
        found = evaluate(actors, source, config, scorer=scorer, progress=progress, by=asked.by)
    return report(whose, found, seed=derive_seed(config.run.seed, "evaluate", "bootstrap"))


def sampling_actors(
    config: RunConfig,
    environments: RunEnvironments,
    first: Path | str,
    *,
    saved: Path | None = None,
    note: Callable[[str], None] | None = None,
) -> Actors:
    """Make actors with the policy whose weights are `saved`, or else those of `first`. `note` is told its types."""
    loaded = load_policy(config, first, saved=saved)
    compute = on_its_device(config.compute, loaded.model)
    if note is not None:
        note(describe_types(loaded.model, compute))
    generator = LocalGenerator(
        loaded.model,
        stop_ids=loaded.stop_ids,
        stop_strings=StopStrings(stop_strings(config, loaded), loaded.codec),
        compute=compute,
    )
    return make_actors(config, environments, loaded, generator, vocab_size=loaded.vocab_size)


def named_policy(run: Path | str, policy: int | str | None = None) -> tuple[RunFolder, int, Path]:
    """The run that is named, and the version and weights of its policy: as for `named_weights`, or the best of
    `RUN:best`. Raises UserError for a policy not kept, and for the run's first weights."""
    path, best = split_best(run)
    if best and policy is not None:
        raise UserError(f"--policy must be left out with RUN:best, got {policy}. Leave one out.")
    folder = open_run_folder(path)
    version, weights = named_weights(folder, BEST if best else policy)
    if weights == first_weights(folder):
        raise UserError(
            f"RUN must have a complete checkpoint of the policy, got its first weights alone in {folder.path}. "
            "Train it with --resume, or name a later policy."
        )
    return folder, version, Path(weights)


def first_weights(folder: RunFolder) -> Path | str:
    return folder.start if folder.config.model.path is None else folder.config.model.path


def weights_of_run(folder: RunFolder) -> dict[int, Path | str]:
    """The places of all policy versions' weights: the run's first ones, the best, snapshots, and checkpoints."""
    kept = [*complete_checkpoints(folder.best), *complete_checkpoints(folder.policies)]
    found = {0: first_weights(folder)} | {int(path.name): path for path in kept}
    return found | {int(path.name): path / "model" for path in complete_checkpoints(folder.checkpoints)}


def named_weights(folder: RunFolder, policy: int | str | None) -> tuple[int, Path | str]:
    """The policy that --policy names, by its version or as the best; None means the run's newest."""
    if policy == BEST:
        path = best_policy(folder.path)
        return int(path.name), path
    known = weights_of_run(folder)
    version = max(known) if policy is None else int(policy) if str(policy).isdecimal() else -1
    if version not in known:
        there = ", ".join(map(str, sorted(known)))
        raise UserError(
            f"--policy must be a version whose weights are still in {folder.path} ({there}), or best, got {policy}. "
            "Set checkpoint.keep_policies to keep more."
        )
    return version, known[version]


Respond = Callable[[Environment, Task, Sequence[Message]], str | None]
"""Takes the place of `Environment.respond`."""


def play_with(
    model: str, environment: str | None, overrides: Sequence[str], *, task: int, respond: Respond | None = None
) -> tuple[Episode, RunConfig]:
    """Let a model play a task: `model` is a run's folder, for its newest policy, RUN:best, or a model's path or id.

    A run's own configuration is used, with the overrides over it, and its own environment where `environment` is None.
    Raises UserError for a model that can't be loaded.
    With `respond`, this function answers the policy's replies, and the environment does not.
    """
    folder, _, saved = named_policy(model) if has_run(split_best(model)[0]) else (None, None, None)
    if environment is not None:
        config = _config_to_play(model, folder, environment, overrides)
    elif folder is not None:
        config = load_plain(to_plain(folder.config), overrides, source="env play")
    else:
        raise UserError(f"--model must be given but for a run's folder, got none for {model!r}. Add --model RUN|MODEL.")
    seed_process(config)
    factory, source = open_tasks(config)
    if respond is not None and any(one.agent for one in factory.all):
        raise UserError("--as user must be given for an environment without an agent, got one with it. Leave it out.")
    if respond is not None:
        factory = RunEnvironments({name: one.answered_by(respond) for name, one in factory.by_name.items()})
    first = model if folder is None else config.model.path or folder.start
    actors = sampling_actors(config, factory, first, saved=saved, note=open_display(stderr=True).note)
    actors.generator.begin(seed=derive_seed(config.run.seed, "play", task), temperature=config.rollout.temperature)
    scores = open_scorer(config, factory).score(list(run_episodes(actors, [source.train(task)], config)))
    return scores.episodes[0], config


def _config_to_play(model: str, folder: RunFolder | None, environment: str, overrides: Sequence[str]) -> RunConfig:
    """The configuration from a file, or from an environment's name, for this model or the run in `folder`."""
    if is_config_file(environment):
        path = model if folder is None else folder.config.model.path
        named = [] if path is None else [f"model.path={json.dumps(path)}"]
        config = load_config(Path(environment), [*overrides, *named])
        own = {} if folder is None else {"model": folder.config.model, "lora": folder.config.lora}
        return config.model_copy(update=own)
    values: dict[str, Any] = {"model": {"path": model}} if folder is None else to_plain(folder.config)
    several = values.pop("environments", None) or {}
    if environment in several:  # the run's own name for one of its environments
        given = several[environment]
        own = {k: v for k, v in given.items() if k not in ("tasks", "share")}
        values |= {"tasks": given["tasks"], "environment": own}
    elif folder is None or folder.config.environment.name != environment:
        values["environment"] = {"name": environment}
    return load_plain(values, overrides, source="env play")
