"""From a configuration to a trained agent: start or resume, run the loop, write the report."""

import shlex
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Literal

from agentloop.algorithms.baselines.grpo import group_advantages
from agentloop.config import RunConfig
from agentloop.distributed.ranks import process_group
from agentloop.errors import TrainingStopped, UserError, explaining_disk
from agentloop.learning.ranked_trainer import check_ranks, serve_rank
from agentloop.runs.checkpoint import Checkpoint, explaining_damage, keep_only, newest_checkpoint, restore_random
from agentloop.runs.display import RunDisplay, showing_progress, with_interval
from agentloop.runs.leadership import Leadership
from agentloop.runs.progress_bars import open_display
from agentloop.runs.run_folder import (
    COMPLETE,
    RunFolder,
    check_length,
    create_run_folder,
    has_run,
    how_to_resume,
    record_config,
    record_environment,
    remove_unbegun,
    resumed_run_folder,
    run_to_continue,
)
from agentloop.runs.run_report import report_run
from agentloop.runs.signals import StopRequest, graceful_stop
from agentloop.training.components import Components, build_components, reasons_for_empty_sources
from agentloop.training.loop import Loop
from agentloop.training.loop_state import LoopState
from agentloop.training.starting_model import warm_up_metrics
from agentloop.training.train_result import TrainResult
from context import RenderError
from replay.errors import DatabaseFailed, ReplayError, RunReplaced
from replay.exchange.attach import attach
from replay.exchange.teacher import teaching_of
from replay.locate import BEST
from replay.pages.report import REPORT_NAME
from replay.questions.filters import condition
from replay.store import ReplayStore


def train(
    config: RunConfig,
    *,
    resume: bool | Literal["auto"] = False,
    run: Path | None = None,
    environment_changed: bool = False,
    display: RunDisplay | None = None,
) -> TrainResult:
    """Train one run to its end.

    `resume` continues the newest run of that name, or the run in the folder `run`, as if it had never stopped. "auto"
    begins a run if there is none, and `run` alone begins one in that folder; neither changes a run that has ended.
    `environment_changed` allows another source of the environment than the run's. Under torchrun, rank 0 calls this and
    the other ranks call `train_worker`.
    Raises UserError for what the user can mend, TrainingStopped when the run itself can't go on.
    """
    with process_group(timeout_s=config.compute.rank_timeout_s, device=config.model.device) as ranks:
        if ranks.index:
            raise ValueError(f"train must be called on rank 0, got rank {ranks.index}. Call train_worker there.")
        check_ranks(config, ranks)
        path = run_to_continue(config, resume=resume) if run is None else run if has_run(run) else None
        folder = create_run_folder(config, run) if path is None else resumed_run_folder(config, path)
        display = display or open_display()
        with folder.lock(), graceful_stop(display.note) as stop, showing_progress(display):
            checkpoint = newest_checkpoint(folder.checkpoints)
            if checkpoint is not None:
                check_length(folder.config, checkpoint.values["loop"]["iteration"], folder.path)
                folder.name_model(checkpoint.folder)
            if checkpoint is not None and resume is not True and (resume == "auto" or run is not None):
                ended = _ended(folder, checkpoint)
                if ended is not None:
                    display.note(f"{folder.path} has ended after iteration {ended.iterations}: nothing is left")
                    return ended
            with _unbegun_removed(folder, new=path is None):
                parts = build_components(
                    folder, display, checkpoint, ranks=ranks, environment_changed=environment_changed
                )
            with closing(parts), _leading(parts):
                # A run that workers may have joined, or with a database elsewhere, stays.
                alone = config.collection.by == "loop" and config.replay.database is None
                with _unbegun_removed(folder, new=path is None and alone):
                    loop = Loop(parts, begin_run(parts, checkpoint))
                    if not loop.state.evaluations:
                        _first_evaluation(loop)
                try:
                    report = _run(loop, stop)
                except Exception:
                    _show_end(loop, "the error below")
                    raise
                if loop.finished:
                    loop.collection.end_run()
                result = _result(folder, loop.state, report, stop)
                loop.note_trouble(at_end=True)
                _show_end(loop, result.why_ended)
    return replace(result, troubles=tuple(sorted(loop.troubles)))


def _result(folder: RunFolder, state: LoopState, report: Path, stop: StopRequest | None = None) -> TrainResult:
    (_, before), (last, after) = state.evaluations[0], state.evaluations[-1]
    exit_code = 0 if stop is None else stop.exit_code
    end, best = state.end(folder.config.run), None if state.best is None else state.best.iteration
    why = end[0] if end is not None else f"interrupted by {Signals(exit_code - 128).name}"
    measured = (state.iteration, before, after, report, last, state.held_out_tasks)
    return TrainResult(folder.path, *measured, exit_code, best=best, why_ended=why)


def _show_end(loop: Loop, why: str) -> None:
    """Say which policy is the best, how the run goes on, and at last why it has ended."""
    state, folder, note = loop.state, loop.components.folder, loop.components.display.note
    end, command = state.end(folder.config.run), how_to_resume(folder)
    how = " --set " if command.endswith("--resume") else ", with "
    setting = "" if end is None else how + end[1]
    if (best := state.best) is not None:
        figure, weights = with_interval(best.success, best.tasks), folder.best / state.best_name
        kept = f"{weights}. To export it: agentloop export {shlex.quote(str(folder.path))}:{BEST} --to FOLDER"
        kept = kept if weights.exists() else "whose weights were not kept (checkpoint.best)"
        note(f"best policy: iteration {best.iteration}, held-out success {figure}, {kept}")
    note(f"to go on: {command}{setting}")
    note(f"ended after iteration {state.iteration} of {folder.config.run.iterations}: {why}")


def _ended(folder: RunFolder, checkpoint: Checkpoint) -> TrainResult | None:
    """The result of a run that has ended, of which its workers are told; None for any other run."""
    state, report = LoopState.from_values(checkpoint.values["loop"]), folder.path / REPORT_NAME
    if state.end(folder.config.run) is None or not report.exists():
        return None
    with closing(ReplayStore.open(folder.database)) as store:
        store.roles.end_run(folder.run_id)  # the learner may have been killed before it did
    return _result(folder, state, report)


def train_worker(config: RunConfig) -> None:
    """Hold and update a part of the weights, on any rank but 0, until the run of rank 0 ends."""
    with process_group(timeout_s=config.compute.rank_timeout_s, device=config.model.device) as ranks:
        serve_rank(ranks)


@contextmanager
def _unbegun_removed(folder: RunFolder, *, new: bool) -> Iterator[None]:
    """Remove a new run that fails before its first checkpoint, unless a model was warmed up for it."""
    try:
        yield
    except (UserError, RenderError, ReplayError) as error:
        warmed_up = folder.config.model.path is None and (folder.start / COMPLETE).exists()
        if new and not warmed_up and not isinstance(error, (RunReplaced, DatabaseFailed)):
            remove_unbegun(folder)
        raise


def _leading(parts: Components) -> AbstractContextManager[None]:
    """Make this process the one learner of the workers. Raises ReplayError, before any change, if there is another."""
    section = parts.config.collection
    if section.by == "loop":
        return nullcontext()
    parts.store.add_run(parts.folder.record(parts.authors, parts.fingerprint))
    return Leadership(parts.store, parts.run_id, str(parts.folder.path.resolve()), lease_s=section.lease_s).held()


def begin_run(parts: Components, checkpoint: Checkpoint | None) -> LoopState:
    """Prepare the run for its next iteration; a start is a resume without a checkpoint."""
    folder = parts.folder
    parts.store.add_run(folder.record(parts.authors, parts.fingerprint))
    parts.store.roles.end_run(parts.run_id, ended=False)
    record_environment(folder, parts.actors.environments.source)
    change = record_config(folder)
    state = _restore(parts, checkpoint) if checkpoint else LoopState.first(parts.config)
    report = parts.store.resume(folder.run_id, state.iteration)
    state.attempt = report.next_attempt
    keep_only(folder.best, [state.best_name])  # a best policy of later iterations is made again
    if checkpoint:
        words = ("reservations released", "draws rolled back", "trajectories orphaned", "to be fresh again")
        counts = (report.released, report.rolled_back, report.orphaned, report.fresh_again)
        undone = ", ".join(f"{count} {what}" for count, what in zip(counts, words, strict=True) if count)
        undone = f"; undone of what came after it: {undone}" if undone else ""
        parts.display.note(f"resumed {folder.path} after iteration {state.iteration}{undone}")
        if change is not None:
            parts.display.note(change)
        _note_other_versions(parts)
        restore_random(checkpoint)
        parts.publisher.resume(state.iteration)
    else:
        parts.display.note(f"run folder: {folder.path}")
        parts.publisher.publish(0)
        attach_buffers(parts)
    _note_empty_sources(parts)
    return state


def _note_empty_sources(parts: Components) -> None:
    """Remark on sources without rows. They are no error, because rows can be imported during a run."""
    replay = parts.config.replay
    if parts.mixer.rule.highest_fraction > 0:
        for sentence in reasons_for_empty_sources(parts):
            parts.display.note(sentence)
    elif replay.attach or replay.sources:
        parts.display.note("replay.fraction is 0, so no row of replay.attach or replay.sources is drawn. Set it.")


def _note_other_versions(parts: Components) -> None:
    """Remark on rows in the buffer that another version of the environment has rewarded."""
    environments = parts.actors.environments
    if {*parts.folder.environments, environments.source} == {environments.source}:
        return
    others = dict.fromkeys(f"environment_version != {one.version!r}" for one in environments.all)
    now, filter = environments.version, " and ".join([*others, "source == 'self'"])
    older = condition(f"{filter} and state == 'eligible'")
    found = parts.store.prune(parts.run_id, rows=older, dry_run=True)
    parts.display.note(
        f"environment changed: rows collected from now on have its version {now}; {found.rows} of other versions "
        f'can still be drawn. To drop them: agentloop replay prune {parts.folder.path} --where "{filter}" --yes'
    )


def _restore(parts: Components, checkpoint: Checkpoint) -> LoopState:
    if checkpoint.values["run"] != parts.run_id:
        raise UserError(
            f"checkpoints must belong to the run {parts.run_id}, got one of {checkpoint.values['run']} in "
            f"{checkpoint.folder}. Put the right folder back."
        )
    with explaining_damage(checkpoint.folder):
        parts.trainer.load(checkpoint.state)
    parts.sampler.load_state(checkpoint.values["sampler"])
    parts.mixer.load_state(checkpoint.values["mixer"])
    parts.source.check_state(checkpoint.values["source"])
    return LoopState.from_values(checkpoint.values["loop"])


def _run(loop: Loop, stop: StopRequest) -> Path:
    """Run the loop and write the report, also of a run that was stopped by a fault."""
    try:
        with stop.working():
            loop.run(stop)
    except TrainingStopped:
        _write_report(loop.components)
        raise
    except UserError as error:
        if "--resume" not in str(error):
            command = how_to_resume(loop.components.folder)
            option = "--environment-changed" if command.endswith("--resume") else "environment_changed=True"
            changed = f"{option} too if a file of the environment, rewards or tasks.data has changed"
            error.args = (f"{error} Then go on: {command}, with {changed}.",)
        raise
    return _write_report(loop.components)


def _write_report(parts: Components) -> Path:
    path = parts.folder.path / REPORT_NAME
    parts.display.phase("report", 0, 1)
    with explaining_disk(path, advice="The run itself is whole: make room and run again with --resume."):
        return report_run(parts.store, path, run=parts.run_id)


def _first_evaluation(loop: Loop) -> None:
    parts = loop.components
    metrics = loop.evaluate()
    parts.store.add_metrics(parts.run_id, 0, metrics | warm_up_metrics(parts.folder))
    loop.save()
    success = with_interval(metrics["eval/success"], loop.state.held_out_tasks)
    parts.display.note(f"held-out success before training: {success}")
    parts.display.note(loop.pace.episodes_to_come())


def attach_buffers(parts: Components) -> None:
    """Copy the rows of attached buffers before the first iteration, except those that an earlier start has copied."""
    teach = partial(teaching_of, parts.store, parts.run_id, parts.folder.start, group_advantages)
    for name, place in parts.config.replay.attach.items():

        def progress(phase: str, done: int, name: str = name) -> None:
            parts.display.phase(f"attach {name}: {phase}", done, done)

        allowed = parts.config.replay.allow_mismatch
        report = attach(parts.store, parts.run_id, name, place, teach=teach, allow_mismatch=allowed, progress=progress)
        for problem in report.problems:
            parts.display.note(f"replay.attach: left out {problem}")
        parts.display.note(f"attached {place} as {name}: {report.rows:,} rows, {report.inserted:,} of them copied now")
