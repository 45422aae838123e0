"""Supervised training of a model on one's own demonstrations, as a start for reinforcement learning."""

from __future__ import annotations

import math
import random
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from agentloop.config import RunConfig
from agentloop.config.seeds import derive_seed
from agentloop.distributed.tensor_files import read_tensors, write_tensors
from agentloop.environments.datasets import digest_of, held_out_by_content
from agentloop.errors import TrainingStopped, UserError
from agentloop.learning.optimizer import WeightOptimizer, learning_rate
from agentloop.models.actor import Actor
from agentloop.models.adapters import load_policy
from agentloop.models.backbone_passes import describe_types
from agentloop.models.loading import LoadedModel, check_positions, muted_libraries
from agentloop.models.memory import check_memory, choose_checkpointing, machine_memory, memory_suffices
from agentloop.models.tiny import build_tiny_model
from agentloop.runs.checkpoint import (
    Checkpoint,
    explaining_damage,
    newest_checkpoint,
    prune,
    restore_random,
    save_checkpoint,
    seed_process,
    write_directory,
)
from agentloop.runs.display import RunDisplay, showing_progress
from agentloop.runs.progress_bars import open_display
from agentloop.runs.run_folder import (
    COMPLETE,
    RunFolder,
    create_run_folder,
    record_chosen,
    record_config,
    remove_unbegun,
    resumed_run_folder,
)
from agentloop.runs.signals import StopRequest, graceful_stop
from agentloop.runs.sinks import MetricSinks, open_sinks
from agentloop.supervised.demonstrations import (
    Demonstration,
    compare_with_environment,
    conversation_texts,
    read_demonstrations,
)
from agentloop.supervised.supervised_update import Learned, learn
from replay.locate import METRICS, newest_model
from replay.records import RunRecord
from replay.store import ReplayStore

_Row = TypeVar("_Row")
_FIRST = "start"
"""Folder of the built-in model before the training."""
_READ_SECTIONS = ("run", "model", "tiny", "lora", "context", "batch", "compute", "optimizer", "sft", "checkpoint")
"""Sections of the configuration that this training uses."""


@dataclass(frozen=True)
class SftResult:
    folder: Path
    model: Path
    """Folder of the trained model, for model.path: after all updates, or those so far where a signal ended it."""
    updates: int
    conversations: int
    held_out: int
    held_out_before: float
    """Mean loss of a trained token of the held-out conversations, nats."""
    held_out_after: float
    measured_after: int
    """The update after which `held_out_after` was measured; 0 if none was."""
    exit_code: int
    """0, or 128 + signal when a signal ended it early."""


def sft(config: RunConfig, *, resume: bool | Path = False, display: RunDisplay | None = None) -> SftResult:
    """Train `model.path`, or a new built-in model, on `sft.data` in a folder of its own, <folder>/<name>-sft-001.

    `resume` continues the newest of these trainings from its last checkpoint, to the same weights as if it had never
    stopped. A folder continues the training in it, whose configuration `config` is.
    Raises UserError for what the user can mend, TrainingStopped for a loss or gradient that is no number.
    """
    run, display = resume if isinstance(resume, Path) else None, display or open_display()
    config = _with_own_name(config) if run is None else config
    folder, data = (_resume_training(config, run), None) if resume else _begin_training(config, display)
    with folder.lock(), graceful_stop(display.note) as stop, showing_progress(display):
        if (change := record_config(folder)) is not None:
            display.note(change)
        checkpoint = newest_checkpoint(folder.checkpoints)
        saved = checkpoint.model if checkpoint else None
        data = data or _read(folder.as_begun, _first_model(folder, display), display, saved=saved)
        update = checkpoint.values["update"] if checkpoint else -1
        sinks = open_sinks(config.metrics.sinks, folder.path, warn=display.note, keep_through=update)
        with closing(sinks), closing(ReplayStore.create(folder.path / METRICS)) as store:
            training = _Training(data, folder, sinks, store, display)
            training.begin(checkpoint)
            training.run(stop)
    return training.result(stop.exit_code)


def _with_own_name(config: RunConfig) -> RunConfig:
    """The configuration under a name of its own, with its own numbers, and without a buffer elsewhere."""
    run = config.run.model_copy(update={"name": f"{config.run.name}-sft"})
    return config.model_copy(update={"run": run, "replay": config.replay.model_copy(update={"database": None})})


def _resume_training(config: RunConfig, run: Path | None) -> RunFolder:
    folder = resumed_run_folder(config, run)
    if folder.environments:
        raise UserError(
            f"CONFIG must be the folder of a training by sft, got {str(folder.path)!r}, which train wrote. To go on "
            f"with it: agentloop train {shlex.quote(str(folder.path))} --resume"
        )
    return folder


def _begin_training(config: RunConfig, display: RunDisplay) -> tuple[RunFolder, _Data]:
    """Create a new folder and read the data. Unusable data leaves no folder."""
    if config.sft.data is None:
        raise UserError("sft.data must be named for sft, got null. Set it with --set sft.data=PATH.")
    if (difference := compare_with_environment(config)) is not None:
        display.note(difference)
    if config.model.path is not None:
        data = _read(config, config.model.path, display)
        return create_run_folder(config), data
    folder = create_run_folder(config)
    try:
        return folder, _read(config, _first_model(folder, display), display)
    except Exception:
        remove_unbegun(folder)
        raise


def _first_model(folder: RunFolder, display: RunDisplay) -> str:
    """The place of the first weights. The built-in model is made at first use, with a tokenizer of the data."""
    config = folder.config
    if config.model.path is not None:
        return config.model.path
    first = folder.path / _FIRST
    if not (first / COMPLETE).exists():
        display.note(f"making the built-in model, with a tokenizer of {config.sft.data}")
        corpus = conversation_texts(Path(str(config.sft.data)), key="sft.data")
        seed = derive_seed(config.run.seed, "built-in model") % 2**31
        with muted_libraries():
            write_directory(first, lambda target: build_tiny_model(target, config.tiny, corpus=corpus, seed=seed))
    return str(first)


@dataclass(frozen=True)
class _Data:
    """The model and its training data, in the model's own tokens."""

    config: RunConfig
    loaded: LoadedModel
    trained: list[Demonstration]
    held_out: list[Demonstration]

    @property
    def digest(self) -> str:
        return digest_of([*(row.digest for row in self.trained), "", *(row.digest for row in self.held_out)])


def _read(config: RunConfig, first: str, display: RunDisplay, *, saved: Path | None = None) -> _Data:
    seed_process(config)
    loaded = load_policy(config, first, saved=saved)
    if (note := check_positions(loaded.model, config.context.max_tokens)) is not None:
        display.note(note)
    found = read_demonstrations(Path(str(config.sft.data)), config, loaded, key="sft.data")
    if config.sft.held_out is not None:
        others = read_demonstrations(Path(config.sft.held_out), config, loaded, key="sft.held_out")
        found.too_long += others.too_long
        found.ignored += others.ignored
        trained, held_out = found.read, others.read
    else:
        away = held_out_by_content([row.digest for row in found.read], config.sft.held_out_share)
        trained = [row for row, is_away in zip(found.read, away, strict=True) if not is_away]
        held_out = [row for row, is_away in zip(found.read, away, strict=True) if is_away]
        if not trained:
            raise UserError(
                f"sft.data must hold conversations to train on and others to measure on, got {len(found.read)} of one "
                "content. Name others with sft.held_out, or add some."
            )
    display.note(
        f"demonstrations: {len(trained):,} to train on, {len(held_out):,} held out, {found.too_long:,} left out as "
        "too long for the context"
    )
    if found.ignored:
        display.note(f"fields not looked at: {', '.join(sorted(found.ignored))}")
    return _Data(config, loaded, trained, held_out)


def batch_of_update(rows: Sequence[_Row], update: int, *, size: int, seed: int) -> list[_Row]:
    """The rows of the 1-based `update`. Every epoch has all rows once, in an order from the seed."""
    epoch, place = divmod(update - 1, -(-len(rows) // size))
    order = list(rows)
    random.Random(derive_seed(seed, "sft", epoch)).shuffle(order)
    return order[place * size : (place + 1) * size]


class _Training:
    def __init__(
        self, data: _Data, folder: RunFolder, sinks: MetricSinks, store: ReplayStore, display: RunDisplay
    ) -> None:
        self.data = data
        self.update = 0
        """Updates made."""
        self.losses: list[tuple[int, float]] = []
        """(update, held-out loss), oldest first."""
        self._folder, self._sinks, self._store, self._display = folder, sinks, store, display
        self._config = config = data.config
        section = config.sft
        own = {"warmup_iterations": section.warmup_updates, "schedule": section.schedule}
        self._schedule = config.optimizer.model_copy(update={"learning_rate": section.learning_rate, **own})
        self._actor = Actor(data.loaded.model, packs=config.batch.packs, compute=config.compute)
        self._optimizer = WeightOptimizer(data.loaded.model, self._schedule)
        compute = self._actor.compute
        moved = record_chosen(folder, device=self._actor.device.type, autocast=compute.autocast)
        display.note(describe_types(data.loaded.model, compute) + moved)
        self._authors = config.context.author_table()
        self._per_epoch = -(-len(data.trained) // section.batch)
        self._total = self._per_epoch * section.epochs

    def begin(self, checkpoint: Checkpoint | None) -> None:
        self._store.add_run(self._record())
        self._store.roles.end_run(self._folder.run_id, ended=False)
        if checkpoint is None:
            self._display.note(f"folder: {self._folder.path}")
            self._measure({})
            return
        values = checkpoint.values
        if values["digest"] != self.data.digest:
            raise UserError(
                "sft.data must hold the conversations that the training began with, got others. Put the file back, or "
                "start a new one without --resume."
            )
        self.update, self.losses = values["update"], [(int(u), float(loss)) for u, loss in values["held_out"]]
        with explaining_damage(checkpoint.folder):
            self._optimizer.load_state(read_tensors(checkpoint.state))
        restore_random(checkpoint)
        self._display.note(f"resumed {self._folder.path} after update {self.update}")

    def _record(self) -> RunRecord:
        """The record of this training, whose iterations are updates."""
        whole = self._folder.record(self._authors)
        config = {name: whole.config[name] for name in _READ_SECTIONS}
        config["run"]["iterations"] = self._total
        return replace(whole, config=config)

    def run(self, stop: StopRequest) -> None:
        """Train to the last update or a request to stop; then save a checkpoint."""
        with stop.working(), memory_suffices(self._config.batch.micro_batch_tokens):
            if self._actor.device.type == "cpu" and self.update == 0:
                state = self._optimizer.bytes_of_state()
                self._display.note(check_memory(self._actor, self._config, state=state, there=machine_memory()))
            to_come = self._optimizer.bytes_to_come()
            if chosen := choose_checkpointing(self._actor, self._config, to_come=to_come):
                self._display.note(chosen)
            while self.update < self._total and not stop.requested:
                began = time.perf_counter()
                metrics = self._learn(self.update + 1)
                seconds = {"time/iteration": time.perf_counter() - began}
                self._store.add_metrics(self._folder.run_id, self.update, metrics | seconds)
                if self.update % self._config.sft.every == 0 or self.update == self._total:
                    self._measure(metrics)
                else:
                    self._sinks.log(self.update, metrics)
                    if self.update % -(-self._total // 20) == 0:
                        self._display.note(f"update {self.update}/{self._total}  loss {metrics['sft/loss']:.4f}")
            if stop.requested:
                self._save()
            if self.update == self._total:
                write_directory(self._folder.model, self._save_model)
                self._store.roles.end_run(self._folder.run_id)

    def result(self, exit_code: int) -> SftResult:
        sides = len(self.data.trained), len(self.data.held_out)
        (_, before), (last, after) = self.losses[0], self.losses[-1]
        model = newest_model(self._folder.path) or self._folder.model
        return SftResult(self._folder.path, model, self.update, *sides, before, after, last, exit_code)

    def _learn(self, update: int) -> dict[str, float]:
        rate = learning_rate(self._schedule, iteration=update, iterations=self._total)
        self._optimizer.set_learning_rate(rate)
        self._optimizer.clear_gradients()
        rows = batch_of_update(self.data.trained, update, size=self._config.sft.batch, seed=self._config.run.seed)
        learned = self._learned(rows)
        norm = self._optimizer.gradient_norm()
        if not math.isfinite(learned.loss + norm):
            raise TrainingStopped(
                f"loss and gradient must be finite, got {learned.loss:g} and {norm:g} in update {update}. Nothing "
                "of it was applied. Lower sft.learning_rate; a new run can have model.dtype: float32."
            )
        if norm > 0.0:
            self._optimizer.step(norm)
        self.update = update
        self._display.phase("sft", update, self._total)
        return {
            "sft/loss": learned.loss,
            "sft/tokens": learned.tokens,
            "sft/grad_norm": norm,
            "sft/learning_rate": rate,
            "sft/epoch": update / self._per_epoch,
        }

    def _learned(self, rows: list[Demonstration]) -> Learned:
        sequences = [sequence for row in rows for sequence in row.sequences]
        return learn(self._actor, sequences, self._authors, max_tokens=self._config.batch.micro_batch_tokens)

    def _measure(self, metrics: Mapping[str, float]) -> None:
        """Measure the held-out loss, show and log it with the update's own figures, and save a checkpoint."""
        with torch.no_grad():
            loss = self._learned(self.data.held_out).loss
        self.losses.append((self.update, loss))
        measured = {"sft/held_out_loss": loss}
        self._store.add_metrics(self._folder.run_id, self.update, measured)
        self._sinks.log(self.update, {**metrics, **measured})
        trained = f"  loss {metrics['sft/loss']:.4f}" if metrics else ""
        self._display.note(f"update {self.update}/{self._total}{trained}  held-out loss {loss:.4f}")
        self._save()

    def _save(self) -> None:
        values = {"digest": self.data.digest, "update": self.update, "held_out": self.losses}
        folder, save_state = self._folder.checkpoints, partial(write_tensors, tensors=self._optimizer.state())
        save_checkpoint(folder / f"{self.update:06d}", self._save_model, save_state, values)
        prune(folder, keep=self._config.checkpoint.keep)

    def _save_model(self, target: Path) -> None:
        with muted_libraries():
            self.data.loaded.model.save_pretrained(target)
        self.data.loaded.tokenizer.save_pretrained(target)
