"""From a checkpoint and the recorded draws, a run's updates once more: do they give the run's weights?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version as installed_version

from agentloop.config import RunConfig
from agentloop.config.config_file import load_plain, to_plain
from agentloop.distributed.tensor_files import several_wrote
from agentloop.environments import open_tasks
from agentloop.errors import UserError
from agentloop.learning.trainer import Trainer
from agentloop.records import TurnRewards
from agentloop.rollouts.stored.stored_episodes import StoredEpisodes
from agentloop.rollouts.stored.turn_rewards import stored_turn_rewards
from agentloop.runs.checkpoint import Checkpoint, complete_checkpoints, load_checkpoint, readable, restore_random
from agentloop.runs.display import RunDisplay
from agentloop.runs.process import seed_process
from agentloop.runs.run_folder import RunFolder
from agentloop.training.advantage_estimator import AdvantageEstimator
from agentloop.training.mixed_batch import learned_rows
from agentloop.training.retrain.compared_weights import (
    ComparedWeights,
    StoredWeights,
    compare,
    stored_weights,
)
from agentloop.training.retrain.recorded_batches import RecordedBatch, check_recorded, recorded_batch
from agentloop.training.trained_policy import TrainedPolicy, load_trained_policy
from replay.records import BatchRow
from replay.store import ReplayStore


@dataclass(frozen=True)
class Retrained:
    """What came out of a run's updates when they were made again."""

    checkpoint: str
    """Where they began from."""
    compared: tuple[ComparedWeights, ...]
    notes: tuple[str, ...]
    """Why weights may differ; empty if none do."""

    @property
    def equal(self) -> bool:
        return all(each.differing == 0 for each in self.compared)


def retrain(
    store: ReplayStore,
    folder: RunFolder,
    *,
    start: int,
    end: int | None = None,
    device: str | None = None,
    display: RunDisplay,
) -> Retrained:
    """Make the updates after checkpoint `start` again, up to `end`, and compare wherever the run left weights.

    `end` is the last iteration that left any when left out, `device` the run's. Nothing of the run is written.
    Raises UserError, before anything is computed, where there is no such checkpoint, nothing to compare with, or not
    all that the updates learned from.
    """
    config = folder.config if device is None else _on_device(folder.config, device)
    checkpoint = _checkpoint_of(folder, start)
    stored = _comparable(store, folder, checkpoint, end)
    last = max(stored)
    check_recorded(store, folder, range(start + 1, last + 1))
    seed_process(config)
    policy = load_trained_policy(config, config.model.path or folder.start, checkpoint)
    authors = config.context.author_table()
    estimator = AdvantageEstimator(config, authors, _turn_rewards(store, folder))
    trainer = Trainer(policy.actor, config, authors=authors, reference=policy.reference)
    with readable(checkpoint.folder):
        trainer.load(checkpoint.state, checkpoint.values["trainer"])
    restore_random(checkpoint)
    compared = []
    for iteration in range(start + 1, last + 1):
        display.phase("update", iteration - start - 1, last - start)
        batch = recorded_batch(store, folder, iteration)
        result = trainer.update(_rows(batch, config, policy, estimator), iteration=iteration)
        line = f"iteration {iteration}: {len(batch.rows)} rows, {result.optimizer_steps} optimizer steps"
        if iteration in stored:
            compared.append(compare(policy.loaded, lambda: trainer.state()[0], stored[iteration]))
            line += f", {_in_words(compared[-1])} {compared[-1].stored}"
        display.note(line)
    display.phase("update", last - start, last - start)
    differ = any(each.differing for each in compared)
    notes = tuple(_notes(store, folder, checkpoint)) if differ else ()
    return Retrained(f"{checkpoint.folder.parent.name}/{checkpoint.folder.name}", tuple(compared), notes)


def _rows(
    batch: RecordedBatch, config: RunConfig, policy: TrainedPolicy, estimator: AdvantageEstimator
) -> list[BatchRow]:
    """What the loop gave its trainer."""
    replay = config.replay
    rows, _ = estimator.as_trained(batch.rows, replay.baseline if replay.mode == "train" else "stored")
    scored_by = batch.policy_version if policy.scores_are_stored else None
    return learned_rows(rows, observes=replay.mode == "observe", scored_by=scored_by)


def _in_words(compared: ComparedWeights) -> str:
    return "equal to" if compared.differing == 0 else f"{compared.differing} of {compared.tensors} tensors differ from"


def _on_device(config: RunConfig, device: str) -> RunConfig:
    values = to_plain(config)
    values["model"] |= {"device": device}
    return load_plain(values, source="retrain")


def _checkpoint_of(folder: RunFolder, iteration: int) -> Checkpoint:
    """Raises UserError for one that is not whole, not the run's, or of several ranks."""
    known = {int(path.name): path for path in complete_checkpoints(folder.checkpoints)}
    if iteration not in known:
        there = ", ".join(map(str, known)) or "none"
        raise UserError(
            f"--from must be an iteration with a complete checkpoint in {folder.path} ({there}), got {iteration}. "
            "Set checkpoint.keep and checkpoint.every to keep more."
        )
    checkpoint = load_checkpoint(known[iteration])
    if checkpoint.values["run"] != folder.run_id:
        raise UserError(
            f"checkpoints must belong to the run {folder.run_id}, got one of {checkpoint.values['run']} in "
            f"{checkpoint.folder}. Put the right folder back."
        )
    return checkpoint


def _comparable(
    store: ReplayStore, folder: RunFolder, checkpoint: Checkpoint, end: int | None
) -> dict[int, StoredWeights]:
    """What the run left after the checkpoint, up to iteration `end`. Raises UserError where that is nothing."""
    start = int(checkpoint.folder.name)
    found = stored_weights(store, folder, after=start)
    there = ", ".join(map(str, found)) or "none"
    if not found:
        raise UserError(
            f"--from must be before an iteration whose weights are there to compare with, got {start} with none after "
            f"it in {folder.path}. Name an earlier checkpoint, or keep more (checkpoint.keep, "
            "checkpoint.keep_policies)."
        )
    if end is not None and end not in found:
        raise UserError(
            f"--to must be an iteration after {start} whose weights are there to compare with ({there}), got {end}. "
            "Name one of these."
        )
    found = {number: each for number, each in found.items() if end is None or number <= end}
    for state in (checkpoint.state, *(each.state for each in found.values())):
        if state is not None and several_wrote(state):
            raise UserError(
                f"RUN must have been trained on one rank to be retrained, got a checkpoint of several at {state}. They "
                "add in another order, so the same bits can't be expected."
            )
    return found


def _turn_rewards(store: ReplayStore, folder: RunFolder) -> TurnRewards | None:
    """What the environment rewards turns with, where credit is theirs: they are not stored."""
    if folder.config.advantage.credit != "turn":
        return None
    if len(set(folder.environments)) > 1:
        raise UserError(
            "advantage.credit must be trajectory to retrain a run whose environment was changed, got turn: turn "
            "rewards are asked of the environment as it is."
        )
    factory, _ = open_tasks(folder.config, folder.environments)
    return stored_turn_rewards(StoredEpisodes(factory, store))


def _notes(store: ReplayStore, folder: RunFolder, checkpoint: Checkpoint) -> Iterator[str]:
    """What is known to change bits."""
    began, now = store.run(folder.run_id).code_version, installed_version("agentloop-replay")
    if began != now:
        yield f"the run was begun by version {began} of agentloop, this is {now}"
    if any(name.startswith("cuda") for name in checkpoint.random):
        yield "the run's machine had a GPU: equal bits are promised for runs on a CPU only"
