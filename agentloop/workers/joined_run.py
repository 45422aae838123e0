"""A worker joins a run: it waits for the run, and checks that tokenizer, tasks and code are the learner's."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from agentloop.config import RunConfig
from agentloop.engines.remote.engine_client import RemoteEngine, connect_engine
from agentloop.environments import RunEnvironments, Task, TaskSource, open_tasks
from agentloop.errors import UserError
from agentloop.rollouts.actors import Actors, make_actors
from agentloop.rollouts.first_prompts import RowCheck
from agentloop.rollouts.rewards import RewardScorer, open_scorer
from agentloop.runs.run_folder import COMPLETE, RunFolder, has_run, open_run_folder
from context.templates.model_files import ModelFiles, load_model_files
from replay.errors import OtherSchema, ReplayError
from replay.records import RunRecord
from replay.storage.collecting.ticket_records import EVALUATION, TicketRecord
from replay.store import ReplayStore

_LOOK_AGAIN_S = 1.0
_MOST_BATCHES = 8


class IssuedTasks:
    """Makes tickets' tasks from the run's own source, by their numbers in the batch's plan, and checks their hashes."""

    def __init__(
        self, source: TaskSource, environments: RunEnvironments, config: RunConfig, store: ReplayStore
    ) -> None:
        self._source, self._environments, self._store = source, environments, store
        self._held_out_tasks = config.evaluation.tasks
        self._made = lru_cache(_MOST_BATCHES)(self._make)

    def tasks_for(self, tickets: Sequence[TicketRecord]) -> list[Task]:
        """Make the planned tasks of these tickets. Raises UserError where this machine makes other tasks."""
        found = []
        for ticket in tickets:
            known = self._made(ticket.run, None if ticket.purpose == EVALUATION else ticket.iteration)
            if ticket.task not in known:
                raise UserError(
                    f"tasks of a worker must be the learner's, got none with the hash {ticket.task[:12]} for iteration "
                    f"{ticket.iteration}. Use the run's own environment, tasks.data and version of agentloop."
                )
            found.append(known[ticket.task])
        return found

    def _make(self, run: str, iteration: int | None) -> dict[str, Task]:
        """Make the tasks of an iteration's batch, or (None) of the evaluation, by their hashes."""
        if iteration is None:
            tasks = self._source.held_out(self._held_out_tasks)
        else:
            batch = self._store.tickets.planned_batch(run, iteration)
            tasks = [self._source.train(index) for index in batch.plan["tasks"]] if batch else []
        return {self._environments.task_hash(task): task for task in tasks}


@dataclass(frozen=True)
class JoinedRun:
    config: RunConfig
    id: str
    store: ReplayStore
    actors: Actors
    engine: RemoteEngine
    scorer: RewardScorer
    tasks: IssuedTasks


def join_run(path: Path, *, wait_s: float, note: Callable[[str], None]) -> JoinedRun:
    """Wait for the run in the folder `path`, and open it. Raises UserError where this worker can't collect for it."""
    folder, store, run = _wait_for(path, wait_s, note)
    try:
        config = folder.config
        if run.code_version != version("agentloop-replay"):
            note(f"the run was begun with version {run.code_version}, this worker is {version('agentloop-replay')}")
        files = load_model_files(folder.start, template_args=config.context.template_args)
        _check_files(run, files, folder.start)
        environments, source = open_tasks(config, folder.environments, environment_changed=True)
        if environments.source != folder.environments[-1]:
            raise UserError(
                f"environment.name must have the source that the run has, got {environments.where} with another "
                f"(digest {environments.source[:8]} in place of {folder.environments[-1][:8]}). Copy the run's files."
            )
        vocab_size = int((run.fingerprint or {})["vocab_size"])
        engine = connect_engine(config, stop_ids=files.stop_ids, vocab_size=vocab_size, note=note)
        engine.begin(seed=0, temperature=config.rollout.temperature)
        # An unknown reward costs its episode, and is counted; it does not end the worker.
        section = config.reward.model_copy(update={"on_error": "drop"})
        scorer = open_scorer(config.model_copy(update={"reward": section}), environments)
        if any(part.tasks.too_long == "skip" for part in config.parts):
            source = RowCheck(config, environments, files, scorer, note=note).fitting(source)
        actors = make_actors(config, environments, files, engine, vocab_size=vocab_size)
        tasks = IssuedTasks(source, environments, config, store)
        return JoinedRun(config, folder.run_id, store, actors, engine, scorer, tasks)
    except BaseException:
        store.close()
        raise


def _wait_for(path: Path, wait_s: float, note: Callable[[str], None]) -> tuple[RunFolder, ReplayStore, RunRecord]:
    """Wait until the learner has begun the run: both may have been started together."""
    deadline, waited = time.monotonic() + wait_s, False
    while True:
        try:
            return _open_run(path)
        except OtherSchema:
            raise
        except ReplayError as problem:
            if time.monotonic() >= deadline:
                raise UserError(
                    f"RUN must be there within --wait {wait_s:g} s, got {str(path)!r} ({problem}). "
                    "Start it with agentloop train, or name its folder."
                ) from None
            if not waited:
                note(f"waiting for {path}, for {wait_s:g} s at most: {problem}")
            waited = True
        time.sleep(_LOOK_AGAIN_S)


def _open_run(path: Path) -> tuple[RunFolder, ReplayStore, RunRecord]:
    """Open the run. Raises ReplayError where the learner has not begun it yet."""
    if not has_run(path):
        raise ReplayError("no run.json in it")
    folder = open_run_folder(path)
    if folder.config.collection.by != "workers":
        raise UserError(
            f"collection.by must be workers for agentloop worker, got {folder.config.collection.by} in {path}, which "
            "collects by itself. Train another run with --set collection.by=workers."
        )
    if not (folder.start / COMPLETE).exists() or not folder.environments:
        raise ReplayError("the learner has not begun it")
    store = ReplayStore.open(folder.database)
    try:
        return folder, store, store.run(folder.run_id)
    except BaseException:
        store.close()
        raise


def _check_files(run: RunRecord, files: ModelFiles, folder: Path) -> None:
    found = {"tokenizer": files.codec.hash, "template": files.template.hash}
    for name, own in found.items():
        theirs = str((run.fingerprint or {}).get(name))
        if own != theirs:
            raise UserError(
                f"{name} of a worker must be the run's, got {own[:12]} in {folder} in place of {theirs[:12]}. "
                "Copy the run's start folder again, and use the same version of agentloop."
            )
