"""Builds the parts of a run, new or from its last checkpoint."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from agentloop.config import RunConfig
from agentloop.config.seeds import derive_seed
from agentloop.distributed.ranks import ALONE, Ranks
from agentloop.engines import ConcurrentGenerator, Generator
from agentloop.engines.local.local_generator import LocalGenerator, StopStrings
from agentloop.engines.serving.served_engine import ServedEngine, serve_options, served_engine
from agentloop.environments import RunEnvironments, TaskSource, open_tasks
from agentloop.errors import UserError
from agentloop.learning.critic_update import reward_penalty
from agentloop.learning.ranked_trainer import Learner, RankedTrainer, TrainerSpec
from agentloop.learning.stream_losses import stream_losses
from agentloop.learning.trainer import Trainer
from agentloop.models.actor import Actor
from agentloop.models.adapters import load_policy, reference_policy
from agentloop.models.backbone_passes import describe_types
from agentloop.models.loading import LoadedModel, check_positions, load_files
from agentloop.models.memory import check_memory, machine_memory
from agentloop.models.policy_weights import PolicyWeights
from agentloop.rollouts.actors import Actors, checked_parser, make_actors, stop_strings
from agentloop.rollouts.collect import Collector
from agentloop.rollouts.first_prompts import RowCheck
from agentloop.rollouts.hindsight import Hindsight
from agentloop.rollouts.rewards import RewardScorer, open_scorer
from agentloop.rollouts.stored_episodes import StoredEpisodes
from agentloop.runs.checkpoint import Checkpoint, seed_process, write_directory
from agentloop.runs.display import RunDisplay
from agentloop.runs.run_folder import COMPLETE, RunFolder, record_chosen
from agentloop.runs.sinks import MetricSinks, open_sinks
from agentloop.training.advantage_estimator import AdvantageEstimator
from agentloop.training.policies.engine_publisher import connect_engines
from agentloop.training.policies.publisher import Publisher
from agentloop.training.starting_model import starting_model
from agentloop.training.startup_checks import check_disk, check_scoring
from agentloop.user_code import failing_as, load_function, load_sampler
from context import AuthorTable
from context.messages import Message, content_hash
from context.templates.template_report import check_template
from replay.exchange.attach import check_attachable
from replay.mixing.batch_plan import Mixer
from replay.next_batch import empty_sources
from replay.sampling.samplers import Sampler
from replay.storage.write import Redactor
from replay.store import ReplayStore

_TEXT = "The agent reads the question, calls a tool and waits for its answer."
"""Words that models know, which `check_scoring` uses."""


@dataclass(frozen=True)
class _PartsWithoutModel:
    """The parts that need no model. Mistakes in them are found before the built-in model is warmed up."""

    environments: RunEnvironments
    source: TaskSource
    scorer: RewardScorer
    redact: Redactor | None
    store: ReplayStore
    episodes: StoredEpisodes
    estimator: AdvantageEstimator


@dataclass(frozen=True)
class Components(_PartsWithoutModel):
    """The parts of a run that the loop uses."""

    config: RunConfig
    folder: RunFolder
    sampler: Sampler
    mixer: Mixer
    collector: Collector
    hindsight: Hindsight | None
    """Finds successes in failed episodes; None without hindsight."""
    trainer: Learner
    publisher: Publisher
    sinks: MetricSinks
    display: RunDisplay
    authors: AuthorTable
    fingerprint: Mapping[str, str | int]
    scores_are_stored: bool
    """Whether log-probs stored at sampling can be used as the old log-probs of rows of the current policy."""
    opened: ExitStack
    """Resources that are closed with the components."""

    @property
    def run_id(self) -> str:
        return self.folder.run_id

    @property
    def actors(self) -> Actors:
        return self.collector.actors

    @property
    def generator(self) -> Generator | ConcurrentGenerator:
        """The generator that samples from the published policy."""
        return self.publisher.generator

    def close(self) -> None:
        self.opened.close()


def build_components(
    folder: RunFolder,
    display: RunDisplay,
    checkpoint: Checkpoint | None,
    *,
    ranks: Ranks = ALONE,
    environment_changed: bool = False,
) -> Components:
    """Load the first weights, or the checkpoint's, and build all parts. The process is seeded.

    Raises UserError if the environment's source differs from the run's, unless `environment_changed`.
    """
    config = folder.config
    seed_process(config)
    if checkpoint is None:  # a resumed run has the rows already
        for place in config.replay.attach.values():
            check_attachable(place)
    with ExitStack() as opened:
        acting = _open_parts(folder, opened, environment_changed=environment_changed)
        if acting.source.summary is not None:
            display.note(f"tasks: {acting.source.summary}")
        first = starting_model(folder, display)
        if acting.source.summary is not None:
            acting = replace(acting, source=_fitting_tasks(config, acting, first, display))
        seed_process(config)  # also after a warm-up, which an earlier start may have made
        return _connect_parts(folder, display, acting, first, checkpoint, ranks=ranks, opened=opened)


def reasons_for_empty_sources(parts: Components) -> list[str]:
    """Write a sentence for each source from which the next batch can draw no row."""
    section = parts.config.replay
    sampler = load_sampler(section.sampler, 0, section.sampler_options)  # the run's may draw random numbers
    return empty_sources(parts.store, parts.run_id, sampler=sampler)


def _open_parts(folder: RunFolder, opened: ExitStack, *, environment_changed: bool) -> _PartsWithoutModel:
    config = folder.config
    environments, source = open_tasks(config, folder.environments, environment_changed=environment_changed)
    stream_losses(config.loss)
    redact = None if config.replay.redact is None else load_redactor(config.replay.redact)
    scorer = open_scorer(config, environments)
    _check_environment(config, environments)
    store = opened.enter_context(closing(ReplayStore.create(folder.database)))
    episodes = StoredEpisodes(environments, store)
    estimator = AdvantageEstimator(config, episodes.turn_rewards)
    return _PartsWithoutModel(environments, source, scorer, redact, store, episodes, estimator)


def _fitting_tasks(config: RunConfig, acting: _PartsWithoutModel, first: Path | str, display: RunDisplay) -> TaskSource:
    """Try all rows with the tokenizer alone: mistakes in them are found before the model is loaded."""
    progress, files = partial(display.phase, "trying tasks.data"), load_files(config, first)
    return RowCheck(config, acting.environments, files, acting.scorer, display.note, progress).fitting(acting.source)


def _connect_parts(
    folder: RunFolder,
    display: RunDisplay,
    acting: _PartsWithoutModel,
    first: Path | str,
    checkpoint: Checkpoint | None,
    *,
    ranks: Ranks,
    opened: ExitStack,
) -> Components:
    """Load the model, and build the parts that need it, each from the parts before it."""
    config, replay, authors = folder.as_begun, folder.config.replay, folder.config.context.author_table()
    saved = checkpoint.model if checkpoint else None
    done = checkpoint.values["loop"]["iteration"] if checkpoint else 0
    loaded = _load_policy(folder, first, saved, display)
    actor = Actor(loaded.model, packs=config.batch.packs, compute=config.compute)
    moved = record_chosen(folder, device=actor.device.type, autocast=actor.compute.autocast)
    display.note(describe_types(actor.model, actor.compute) + moved)
    sampler, agrees = _checked_sampler(config, loaded, actor, version=done)
    reference = reference_policy(config, first, actor)
    checked_parser(config.context, acting.environments, loaded)  # before the wait for an engine
    trainer, weights, gather = _make_trainer(TrainerSpec(config, first, saved, authors), ranks, actor, reference)
    if sampler is not None:
        publisher = Publisher(loaded, sampler, acting.store, folder=folder, weights=weights, gather=gather)
    else:
        served = opened.enter_context(_start_engine(folder, first, loaded, display)) if config.engine.serve else None
        publisher = connect_engines(folder, loaded, acting.store, weights=weights, note=display.note, served=served)
    if checkpoint is None and isinstance(trainer, Trainer):
        sizes = {"weights": weights.bytes_of_files, "least_policies": publisher.least_folders}
        _check_room(folder, display, actor, state=trainer.bytes_of_state(), sizes=sizes)
    sinks = open_sinks(config.metrics.sinks, folder.path, warn=display.note, keep_through=done)
    opened.callback(sinks.close)
    actors = make_actors(config, acting.environments, loaded, publisher.generator, vocab_size=loaded.vocab_size)
    hindsight = None
    if replay.hindsight.enable:
        held_out = frozenset(content_hash(task.payload) for task in acting.source.held_out(config.evaluation.tasks))
        hindsight = Hindsight(actors, config, acting.episodes, held_out)
    penalty = reward_penalty(config, reference, authors)
    return Components(
        **vars(acting),
        config=config,
        folder=folder,
        sampler=load_sampler(replay.sampler, derive_seed(config.run.seed, "sampler"), replay.sampler_options),
        mixer=Mixer(config.mix_rule()),
        collector=Collector(actors, config, acting.scorer, acting.estimator.advantages_for_groups, penalty),
        hindsight=hindsight,
        trainer=trainer,
        publisher=publisher,
        sinks=sinks,
        display=display,
        authors=authors,
        fingerprint=loaded.fingerprint,
        scores_are_stored=agrees and sampler is not None and config.compute.old_log_probs == "auto",
        opened=opened.pop_all(),
    )


def _check_room(folder: RunFolder, display: RunDisplay, actor: Actor, *, state: int, sizes: Mapping[str, int]) -> None:
    """Show the memory and disk that the run takes. Raises UserError where there is less."""
    if actor.device.type == "cpu":
        display.note(check_memory(actor, folder.config, state=state, there=machine_memory()))
    free = shutil.disk_usage(folder.path).free
    display.note(check_disk(folder.config, state=state, free=free, **sizes))


def _load_policy(folder: RunFolder, first: Path | str, saved: Path | None, display: RunDisplay) -> LoadedModel:
    """Load the policy and its tokenizer, which is stored with the run."""
    display.phase("loading the model", 0, 1)
    loaded = load_policy(folder.config, first, saved=saved)
    display.phase("loading the model", 1, 1)
    _keep_tokenizer(loaded, folder)
    display.note(f"chat template: {check_template(loaded).summary()}")
    if (note := check_positions(loaded.model, folder.config.context.max_tokens)) is not None:
        display.note(note)
    return loaded


def _checked_sampler(
    config: RunConfig, loaded: LoadedModel, actor: Actor, *, version: int
) -> tuple[LocalGenerator | None, bool]:
    """The sampler in this process, and whether it agrees with scoring to 0.001 nats. None if an engine samples."""
    sampler = LocalGenerator(
        loaded.model,
        stop_ids=loaded.stop_ids,
        stop_strings=StopStrings(stop_strings(config, loaded), loaded.codec),
        policy_version=version,
        compute=actor.compute,
    )
    agrees = check_scoring(sampler, actor, text=loaded.codec.encode_text(_TEXT)[:16])
    return sampler if config.rollout.engine == "local" else None, agrees


def _start_engine(
    folder: RunFolder, first: Path | str, loaded: LoadedModel, display: RunDisplay
) -> AbstractContextManager[ServedEngine]:
    """Start the run's own engine, after the learner has its weights, because it measures the free memory."""
    on_gpu = loaded.model.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
    options = serve_options(folder.config, first, shares_gpu=on_gpu)
    return served_engine(options, run=folder.path, note=display.note)


def _check_environment(config: RunConfig, environments: RunEnvironments) -> None:
    """Raises UserError where the environment lacks a method that the configuration needs."""
    for asked, method, rule in (
        (config.advantage.credit == "turn", "turn_rewards", "advantage.credit must be trajectory"),
        (config.replay.hindsight.enable, "achieved", "replay.hindsight.enable must be false"),
    ):
        rewards_replies = method == "turn_rewards" and all(one.can_reward_replies for one in environments.all)
        if asked and not rewards_replies and not environments.define(method):
            has_agent = any(one.agent for one in environments.all)
            advice = "An agent has no such method." if has_agent else f"Write def {method}(self, task, messages)."
            raise UserError(f"{rule} when the environment has no {method}, got {environments.where}. {advice}")


def _make_trainer(
    spec: TrainerSpec, ranks: Ranks, actor: Actor, reference: Actor | None
) -> tuple[Learner, PolicyWeights, Callable[[], None] | None]:
    """The trainer, the published weights, and a function that copies the trainer's weights into them.

    The function is None where they are the same weights.
    """
    if not ranks.several:
        trainer = Trainer(actor, spec.config, authors=spec.authors, reference=reference)
        return trainer, PolicyWeights(actor.model), None
    samples = spec.config.rollout.engine == "local"
    leader = RankedTrainer(spec, ranks, actor, samples=samples, reference=reference)
    return (leader, PolicyWeights(actor.model), leader.publish) if samples else (leader, leader.weights, None)


def _keep_tokenizer(loaded: LoadedModel, folder: RunFolder) -> None:
    """Store the tokenizer with the run, so that the run can be read without the model's folder and without torch."""
    # The generation's configuration names end tokens that the tokenizer lacks.
    parts = (loaded.tokenizer, loaded.model.generation_config)
    if not (folder.start / COMPLETE).exists():
        write_directory(folder.start, lambda target: [part.save_pretrained(target) for part in parts])


def load_redactor(spec: str) -> Redactor:
    """Load the user's function and check its results. Where it fails, nothing may be stored unredacted."""
    function: Callable[..., Any] = load_function(spec, what="replay.redact")

    def redact(messages: tuple[Message, ...]) -> Sequence[Message] | None:
        advice = f" from {spec}. Nothing of it was stored; mend the function."
        with failing_as("replay.redact must take every trajectory's messages, got", advice):
            redacted = function(messages)
        if redacted is None:
            return None
        if not isinstance(redacted, (list, tuple)) or not all(isinstance(message, Message) for message in redacted):
            raise UserError(
                f"replay.redact must return messages or None, got {type(redacted).__name__} from {spec}. "
                "Change messages with dataclasses.replace(message, content=...)."
            )
        return redacted

    return redact
