"""Evaluate a policy that a run left on disk."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from agentloop.assemble import make_actors, settle_process
from agentloop.checkpoint import COMPLETE, complete_checkpoints
from agentloop.console import open_display
from agentloop.environments import open_tasks
from agentloop.errors import UserError
from agentloop.evaluate import Evaluation, evaluate
from agentloop.generation import LocalGenerator
from agentloop.models.load import load_model
from agentloop.run_folder import RunFolder, open_run_folder


def evaluate_run(run: Path, *, policy: int | None, tasks: int | None) -> Evaluation:
    """Same tasks and seed as during training, so that the figures compare."""
    folder = open_run_folder(run)
    config = folder.config
    if tasks is not None:
        config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"tasks": tasks})})
    settle_process(config)
    factory, source = open_tasks(config)
    loaded = load_model(config.model, _weights(folder, policy))
    generator = LocalGenerator(loaded.model, stop_ids=loaded.stop_ids)
    actors = make_actors(config, factory, loaded, generator)
    display = open_display(stderr=True)
    try:
        progress = partial(display.phase, "evaluate")
        return evaluate(actors, source, config, progress=progress)
    finally:
        display.close()


def _weights(folder: RunFolder, policy: int | None) -> Path:
    if policy is None:
        complete = complete_checkpoints(folder.checkpoints)
        if not complete:
            raise UserError(f"RUN must have a complete checkpoint, got none in {folder.path}. Train it with --resume.")
        return complete[-1] / "model"
    path = folder.policies / f"{policy:06d}"
    if not (path / COMPLETE).exists():
        kept = sorted(int(p.parent.name) for p in folder.policies.glob(f"*/{COMPLETE}"))
        what = f"{kept[0]}..{kept[-1]}" if kept else "none (set checkpoint.keep_policies)"
        raise UserError(f"--policy must be a kept snapshot of {folder.path}, got {policy}. Kept: {what}.")
    return path
