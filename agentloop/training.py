"""From a configuration to a trained agent: start or resume, run the loop, write the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentloop import __version__
from agentloop.assemble import Parts, assemble, settle_process, starting_model
from agentloop.checkpoint import Checkpoint, complete_checkpoints, load_checkpoint, restore_random
from agentloop.config import RunConfig
from agentloop.config_file import to_plain
from agentloop.console import RunDisplay, open_display
from agentloop.errors import UserError
from agentloop.loop import Loop, LoopState
from agentloop.report import write_report
from agentloop.run_folder import RunFolder, create_run_folder, latest_run_folder
from agentloop.signals import polite_stop
from replay.records import RunRecord


@dataclass(frozen=True)
class TrainResult:
    folder: Path
    iterations: int
    success_before: float
    success_after: float
    report: Path
    exit_code: int
    """0, or 128 + signal when a signal ended the run early."""


def train(config: RunConfig, *, resume: bool = False, display: RunDisplay | None = None) -> TrainResult:
    """Train one run to its end.

    `resume` continues the newest run of that name from its last complete checkpoint, as if it had never stopped.
    Raises UserError for what the user can mend, TrainingStopped when the run itself can't go on.
    """
    folder = _resumed_folder(config) if resume else create_run_folder(config)
    display = display or open_display()
    try:
        with folder.lock(), polite_stop(display.note) as stop:
            settle_process(config)
            parts, state = _begin(folder, display)
            try:
                loop = Loop(parts, state)
                if not state.evaluations:
                    _first_evaluation(loop)
                loop.run(stop)
                report = write_report(parts.store, folder.path)
            finally:
                parts.sinks.close()
                parts.store.close()
    finally:
        display.close()
    evaluations = loop.state.evaluations
    return TrainResult(folder.path, loop.state.iteration, evaluations[0][1], evaluations[-1][1], report, stop.exit_code)


def _resumed_folder(config: RunConfig) -> RunFolder:
    folder = latest_run_folder(Path(config.run.folder), config.run.name)
    for key, mine in to_plain(folder.config).items():
        theirs = to_plain(config)[key]
        if mine != theirs:
            name = next(n for n in mine if mine[n] != theirs.get(n))
            raise UserError(
                f"{key}.{name} must be the run's own when resuming {folder.path} ({mine[name]!r}), "
                f"got {theirs.get(name)!r}. Take it back, or start a new run without --resume."
            )
    return folder


def _begin(folder: RunFolder, display: RunDisplay) -> tuple[Parts, LoopState]:
    """Everything in place for the next iteration; a start is a resume that found no checkpoint."""
    complete = complete_checkpoints(folder.checkpoints)
    checkpoint = load_checkpoint(complete[-1]) if complete else None
    first = starting_model(folder, display)
    parts = assemble(folder, display, checkpoint=checkpoint, first=first)
    parts.store.add_run(_run_record(folder, parts))
    state = _restore(parts, checkpoint) if checkpoint else LoopState()
    report = parts.store.resume(folder.run_id, state.iteration)
    state.attempt = report.next_attempt
    if checkpoint:
        display.note(
            f"resumed {folder.path} after iteration {state.iteration}: {report.released} reservations released, "
            f"{report.rolled_back} draws rolled back, {report.orphaned} trajectories orphaned"
        )
        restore_random(checkpoint)
    else:
        display.note(f"run folder: {folder.path}")
        parts.publisher.publish(0, folder.config.checkpoint)
    return parts, state


def _restore(parts: Parts, checkpoint: Checkpoint) -> LoopState:
    if checkpoint.values["run"] != parts.run_id:
        raise UserError(
            f"checkpoints must belong to the run {parts.run_id}, got one of {checkpoint.values['run']} in "
            f"{checkpoint.folder}. Put the right folder back."
        )
    tensors = {name: t for name, t in checkpoint.tensors.items() if not name.startswith("random.")}
    parts.trainer.load_state(tensors, checkpoint.values["trainer"])
    parts.sampler.load_state(checkpoint.values["sampler"])
    return LoopState.from_values(checkpoint.values["loop"])


def _first_evaluation(loop: Loop) -> None:
    parts = loop.parts
    parts.store.add_metrics(parts.run_id, 0, loop.evaluate())
    loop.save()


def _run_record(folder: RunFolder, parts: Parts) -> RunRecord:
    return RunRecord(
        id=folder.run_id,
        name=folder.path.name,
        config=to_plain(folder.config),
        authors=parts.authors.to_json(),
        authors_hash=parts.authors.hash,
        code_version=__version__,
    )
