"""Build the parts of a run: from nothing, or from its last checkpoint."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from agentloop.config import RunConfig
from agentloop.config.sections.context import make_strategy
from agentloop.config.seeds import derive_seed
from agentloop.distributed.ranks import ALONE, Ranks
from agentloop.engines import ConcurrentGenerator, Generator
from agentloop.engines.serving.served_engine import ServedEngine, serve_options, served_engine
from agentloop.environments import RunEnvironments, TaskSource, load_environments, makes_tasks, open_tasks
from agentloop.errors import UserCodeFailed, UserError
from agentloop.learning.kl_penalty import reward_penalty
from agentloop.learning.lead import LeadTrainer, Learner, TrainerSpec
from agentloop.learning.trainer import Trainer
from agentloop.models.actor import Actor
from agentloop.models.loading import LoadedModel, load_model, muted_libraries
from agentloop.models.policy_weights import PolicyWeights
from agentloop.models.reward_model import SequenceClassifier
from agentloop.models.tiny import build_tiny_model
from agentloop.rollouts.actors import Actors, checked_parser, make_actors, make_parser, stop_strings
from agentloop.rollouts.collect import Collector
from agentloop.rollouts.demonstrated import demonstrations
from agentloop.rollouts.rewards import RewardScorer, open_scorer
from agentloop.rollouts.stored.hindsight import Hindsight
from agentloop.rollouts.stored.stored_episodes import StoredEpisodes
from agentloop.rollouts.stored.turn_rewards import stored_turn_rewards
from agentloop.runs.checkpoint import Checkpoint, write_directory
from agentloop.runs.display import RunDisplay
from agentloop.runs.run_folder import COMPLETE, RunFolder
from agentloop.runs.sinks import MetricSinks, open_sinks
from agentloop.supervised.warm_up import Demonstrator, warm_up
from agentloop.training.advantage_estimator import AdvantageEstimator
from agentloop.training.policies.engine_publisher import EnginePublisher, connect_engines
from agentloop.training.policies.publish import Publisher
from agentloop.training.startup_checks import check_sampling_memory, free_memory
from agentloop.training.trained_policy import load_trained_policy
from agentloop.user_code import load_function, load_sampler, users_code
from context import AuthorTable, TokenSequence
from context.messages import Message, content_hash
from context.strategies import Strategy
from context.templates.template_report import check_template
from replay.mixing.mixer import Mixer
from replay.sampling.samplers import Sampler
from replay.storage.write import Redactor
from replay.store import ReplayStore

_CORPUS_CONVERSATIONS = 400
_WARM_UP = "warm_up.json"


@dataclass(frozen=True)
class Components:
    """Everything the loop conducts."""

    config: RunConfig
    folder: RunFolder
    store: ReplayStore
    redact: Redactor | None
    sampler: Sampler
    mixer: Mixer
    source: TaskSource
    collector: Collector
    estimator: AdvantageEstimator
    hindsight: Hindsight | None
    """What looks for successes in failed episodes; None: nothing does."""
    generator: Generator | ConcurrentGenerator
    trainer: Learner
    publisher: Publisher
    sinks: MetricSinks
    display: RunDisplay
    authors: AuthorTable
    fingerprint: Mapping[str, str | int]
    scores_are_stored: bool
    """Behavior log-probs of what the policy as it is sampled are its old ones."""
    opened: ExitStack
    """What was started for them, and ends with them."""

    @property
    def run_id(self) -> str:
        return self.folder.run_id

    @property
    def actors(self) -> Actors:
        """What episodes are run with, in training and in evaluation alike."""
        return self.collector.actors

    def close(self) -> None:
        with self.opened:
            self.sinks.close()
            self.store.close()


def starting_model(folder: RunFolder, display: RunDisplay) -> Path | str:
    """Where the run's first weights are; the built-in model is made and warmed up at first use."""
    config = folder.config
    if config.model.path is not None:
        return config.model.path
    if not (folder.start / COMPLETE).exists():
        write_directory(folder.start, lambda target: _make_tiny(target, config, display))
    return folder.start


def _make_tiny(target: Path, config: RunConfig, display: RunDisplay) -> None:
    section = config.warm_up
    without = [part.environment.name for part in config.parts if not makes_tasks(part.environment.name)]
    if without:
        raise UserError(
            f"model.path must name a model, got null: environment {without[0]!r} makes no tasks of its own to warm the "
            "built-in one up with. Name one, for example from agentloop sft, or write make_task and demonstrate."
        )
    environments = load_environments(config, {}, options=section.options)
    if not environments.can_demonstrate:
        raise UserError(
            f"model.path must name a model, got null: environment {environments.where!r} has no demonstrate() "
            "to warm the built-in model up with. Write one, or set model.path."
        )
    display.note(f"making and warming up the built-in model, once, for {target.parent}")
    seed = derive_seed(config.run.seed, "warm-up")
    display.phase("tokenizer", 0, 1)
    began = time.perf_counter()
    with muted_libraries():
        build_tiny_model(target, config.tiny, corpus=_corpus(environments, seed), seed=seed % 2**31)
    context = config.context
    loaded = load_model(config.model, target, template=context.template, template_args=context.template_args)
    authors = config.context.author_table()
    parser = make_parser(config.context.parser, loaded.template, tools=environments.tools)
    strategy = make_strategy(config.context.strategy, config.context.options)
    demonstrators = [Demonstrator(loaded, authors, parser, factory=one, strategy=strategy) for one in environments.all]
    result = warm_up(
        Actor(loaded.model, compute=config.compute),
        _in_turn(demonstrators, environments, seed, strategy),
        section,
        authors=authors,
        control_ids=loaded.codec.added_ids,
        progress=lambda update, loss: display.phase("warm-up", update, section.max_updates),
    )
    display.note(f"warm-up: {result.updates} updates, copying loss {result.loss:.3f}")
    with muted_libraries():
        loaded.model.save_pretrained(target)
        loaded.tokenizer.save_pretrained(target)  # with the template of `context.template`
    seconds = time.perf_counter() - began
    measured = {"warm_up/updates": result.updates, "warm_up/loss": result.loss, "time/warm_up": seconds}
    (target / _WARM_UP).write_text(json.dumps(measured))


def warm_up_metrics(folder: RunFolder) -> dict[str, float]:
    """What the warm-up of the built-in model took; nothing for a model that came trained."""
    path = folder.start / _WARM_UP
    measured: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return measured


def _in_turn(
    demonstrators: Sequence[Demonstrator], environments: RunEnvironments, seed: int, strategy: Strategy
) -> Iterator[Sequence[TokenSequence]]:
    """Conversations of one environment after another, as training sequences."""
    each = [demonstrations(factory, seed=seed, strategy=strategy) for factory in environments.all]
    for demonstrator, conversations in itertools.cycle(zip(demonstrators, each, strict=True)):
        yield demonstrator.sequences(next(conversations))


def _corpus(environments: RunEnvironments, seed: int) -> list[str]:
    """What the tokenizer is trained on: demonstrated conversations, and the tools as the prompt shows them."""
    texts = []
    for factory in environments.all:
        texts += [json.dumps(tool["function"]) for tool in factory.tools] * 20
        for conversation in itertools.islice(demonstrations(factory, seed=seed), _CORPUS_CONVERSATIONS):
            texts += [text for message in conversation for text in _texts(message)]
    return texts


def _texts(message: Message) -> list[str]:
    calls = [json.dumps({"name": call.name, "arguments": dict(call.arguments)}) for call in message.tool_calls]
    return [message.content, *calls]


def build_components(
    folder: RunFolder,
    display: RunDisplay,
    *,
    checkpoint: Checkpoint | None,
    first: Path | str,
    ranks: Ranks = ALONE,
    environment_changed: bool = False,
) -> Components:
    """Load the weights (the checkpoint's, or the first ones) and connect everything.

    On several `ranks` this is for rank 0: `learning.lead.serve_rank` is what the others do. Raises UserError where the
    environment's source is not the run's, unless `environment_changed`.
    """
    opened = ExitStack()
    try:
        return _connected(folder, display, checkpoint, first, ranks, environment_changed, opened)
    except BaseException:
        opened.close()
        raise


def _connected(
    folder: RunFolder,
    display: RunDisplay,
    checkpoint: Checkpoint | None,
    first: Path | str,
    ranks: Ranks,
    environment_changed: bool,
    opened: ExitStack,
) -> Components:
    config = folder.config
    environments, source = open_tasks(config, folder.environments, environment_changed=environment_changed)
    if source.summary is not None:
        display.note(f"tasks: {source.summary}")
    _check_environment(config, environments)
    redact = None if config.replay.redact is None else load_redactor(config.replay.redact)
    policy = load_trained_policy(config, first, checkpoint)
    loaded, actor, local, reference = policy.loaded, policy.actor, policy.local, policy.reference
    checked_parser(config.context, environments, loaded)  # before an engine is waited for
    _keep_tokenizer(loaded, folder)
    authors = config.context.author_table()
    store = ReplayStore.create(folder.database)
    served = opened.enter_context(_serve(folder, first, loaded, display)) if config.engine.serve else None
    sampler = local or _engines(folder, loaded, display, store, served)
    generator: Generator | ConcurrentGenerator = sampler.engine if isinstance(sampler, EnginePublisher) else sampler
    display.note(f"chat template: {check_template(loaded).summary()}")
    saved = checkpoint.model if checkpoint else None
    spec = TrainerSpec(config, first, saved, authors)
    trainer, weights, gather = _make_trainer(spec, ranks, actor, reference)
    if local is not None and actor.device.type == "cuda":
        to_come = trainer.bytes_to_come() if isinstance(trainer, Trainer) else 0
        display.note(check_sampling_memory(local, config, free=free_memory(actor.device) - to_come))
    sinks = open_sinks(config.metrics.sinks, folder.path, warn=display.note, keep_through=policy.version)
    episodes = StoredEpisodes(environments, store)
    estimator = AdvantageEstimator(config, authors, stored_turn_rewards(episodes))
    actors = make_actors(config, environments, loaded, generator, vocab_size=loaded.vocab_size)
    return Components(
        config=config,
        folder=folder,
        store=store,
        redact=redact,
        sampler=load_sampler(
            config.replay.sampler, derive_seed(config.run.seed, "sampler"), config.replay.sampler_options
        ),
        mixer=Mixer(config.mix_rule()),
        source=source,
        collector=Collector(
            actors,
            config,
            _make_scorer(config, environments),
            estimator.of_groups,
            reward_penalty(config, reference, authors, trainer.kl_coef),
        ),
        estimator=estimator,
        hindsight=_make_hindsight(actors, config, episodes, source),
        generator=generator,
        trainer=trainer,
        publisher=Publisher(loaded, sampler, store, folder=folder, weights=weights, gather=gather),
        sinks=sinks,
        display=display,
        authors=authors,
        fingerprint=loaded.fingerprint,
        scores_are_stored=policy.scores_are_stored,
        opened=opened,
    )


def _serve(
    folder: RunFolder, first: Path | str, loaded: LoadedModel, display: RunDisplay
) -> AbstractContextManager[ServedEngine]:
    """The run's own engine. It starts when the learner has its weights, for it measures what memory is free."""
    config = folder.config
    if loaded.model.device.type == "cuda":
        torch.cuda.empty_cache()
    options = serve_options(config, first, shares_gpu=loaded.model.device.type == "cuda")
    variable = config.engine.api_key_env
    return served_engine(options, key_variable=variable, run=folder.path, note=display.note)


def _engines(
    folder: RunFolder, loaded: LoadedModel, display: RunDisplay, store: ReplayStore, served: ServedEngine | None
) -> EnginePublisher:
    strings = stop_strings(folder.config, loaded)
    if strings:
        raise UserError(
            f"rollout.engine must be local where replies end at texts, got vllm and context.stop_strings {strings}. "
            "Use a model with an end of turn of its own."
        )
    return connect_engines(
        folder.config,
        loaded,
        policies=folder.policies,
        run=folder.run_id,
        note=display.note,
        report=partial(store.roles.report, "engine", folder.run_id),
        served=served,
    )


def _check_environment(config: RunConfig, environments: RunEnvironments) -> None:
    """Raises UserError where it lacks what the configuration asks it for."""
    open_scorer(config, environments)  # its functions' files are run once more; the model of rewards is loaded later
    if config.advantage.credit == "turn" and not environments.rewards_turns:
        raise UserError(
            f"advantage.credit must be trajectory when the environment has no turn_rewards, got turn with "
            f"{environments.where}. Write def turn_rewards(self, task, messages)."
        )
    if config.replay.hindsight.enable and not environments.has_achieved:
        raise UserError(
            f"replay.hindsight.enable must be false when the environment does not say what was solved, got true with "
            f"{environments.where}. Write def achieved(self, task, messages)."
        )


def _make_hindsight(
    actors: Actors, config: RunConfig, episodes: StoredEpisodes, source: TaskSource
) -> Hindsight | None:
    if not config.replay.hindsight.enable:
        return None
    held_out = frozenset(content_hash(task.payload) for task in source.held_out(config.evaluation.tasks))
    return Hindsight(actors, config, episodes, held_out)


def _make_trainer(
    spec: TrainerSpec, ranks: Ranks, actor: Actor, reference: Actor | None
) -> tuple[Learner, PolicyWeights, Callable[[], None] | None]:
    """The trainer, the weights that are published, and what brings the trainer's into them: None where they are the
    same."""
    if not ranks.several:
        trainer = Trainer(actor, spec.config, authors=spec.authors, reference=reference)
        return trainer, PolicyWeights(actor.model), None
    samples = spec.config.rollout.engine == "local"
    leader = LeadTrainer(spec, ranks, actor, samples=samples, reference=reference)
    return (leader, PolicyWeights(actor.model), leader.publish) if samples else (leader, leader.weights, None)


def _keep_tokenizer(loaded: LoadedModel, folder: RunFolder) -> None:
    """The run must stay readable when the model's own folder is gone, and where there is no torch."""

    def save(target: Path) -> None:
        loaded.tokenizer.save_pretrained(target)
        # It names end tokens that the tokenizer does not.
        loaded.model.generation_config.save_pretrained(target)

    if not (folder.start / COMPLETE).exists():
        write_directory(folder.start, save)


def _make_scorer(config: RunConfig, environments: RunEnvironments) -> RewardScorer:
    section = config.reward
    model = None if section.model.path is None else SequenceClassifier(section.model, config.model).score
    return open_scorer(config, environments, model=model)


def load_redactor(spec: str) -> Redactor:
    """The user's function, whose answers are checked: what it fails on must not be stored as it is."""
    function: Callable[..., Any] = load_function(spec, what="replay.redact")

    def redact(messages: tuple[Message, ...]) -> Sequence[Message] | None:
        try:
            with users_code():
                redacted = function(messages)
        except UserCodeFailed as failed:
            raise UserError(
                f"replay.redact must take every trajectory's messages, got {failed} from {spec}. Nothing of the "
                "iteration was stored; mend the function and run again with --resume."
            ) from failed
        if redacted is None:
            return None
        if not isinstance(redacted, (list, tuple)) or not all(isinstance(message, Message) for message in redacted):
            raise UserError(
                f"replay.redact must return messages or None, got {type(redacted).__name__} from {spec}. "
                "Change messages with dataclasses.replace(message, content=...)."
            )
        return redacted

    return redact
