"""One episode of a model in an environment, for people to read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentloop.analysis.stored_policies import sampling_actors, stored_weights
from agentloop.config import RunConfig
from agentloop.config.config_file import is_config_file, load_config, load_plain, to_plain
from agentloop.config.seeds import derive_seed
from agentloop.environments import open_tasks
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.episodes.run_episodes import run_episodes
from agentloop.rollouts.rewards import open_scorer
from agentloop.runs.process import seed_process
from agentloop.runs.run_folder import RunFolder, has_run, open_run_folder


def play_with(model: str, environment: str, overrides: Sequence[str], *, task: int) -> tuple[Episode, RunConfig]:
    """The newest policy of the run in the folder `model`, or the model of that path or hub id, plays a training task.

    A run's own configuration holds, with the overrides over it. Raises UserError for what can't be loaded.
    """
    folder = open_run_folder(Path(model)) if has_run(Path(model)) else None
    config = _config(model, folder, environment, overrides)
    seed_process(config)
    factory, source = open_tasks(config)
    if folder is None:
        actors = sampling_actors(config, factory, model)
    else:
        first, saved = config.model.path or folder.start, stored_weights(folder, None)
        actors = sampling_actors(config, factory, first, saved=saved)
    actors.generator.begin(seed=derive_seed(config.run.seed, "play", task), temperature=config.rollout.temperature)
    scores = open_scorer(config, factory).score(list(run_episodes(actors, [source.train(task)], config)))
    return scores.episodes[0], config


def _config(model: str, folder: RunFolder | None, environment: str, overrides: Sequence[str]) -> RunConfig:
    if is_config_file(environment):
        return _of_file(model, folder, Path(environment), overrides)
    values: dict[str, Any] = {"model": {"path": model}} if folder is None else to_plain(folder.config)
    named = {} if folder is None else {part.name: part for part in folder.config.parts}
    if environment in named:  # one of several, by the run's own name for it
        given = values["environments"][environment]
        values["tasks"] = given.pop("tasks")
        values["environment"] = {key: value for key, value in given.items() if key != "share"}
    elif folder is None or folder.config.environment.name != environment:
        values["environment"] = {"name": environment}
    values.pop("environments", None)
    return load_plain(values, overrides, source="env play")


def _of_file(model: str, folder: RunFolder | None, file: Path, overrides: Sequence[str]) -> RunConfig:
    """The file's configuration, for this model or that of the run in `folder`."""
    path = model if folder is None else folder.config.model.path
    config = load_config(file, overrides if path is None else [*overrides, f"model.path={json.dumps(path)}"])
    if folder is None:
        return config
    return config.model_copy(update={"model": folder.config.model, "lora": folder.config.lora})
