"""Build the parts of a run: from nothing, or from its last checkpoint."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentloop.admission import load_sampler, make_admission
from agentloop.checkpoint import COMPLETE, Checkpoint, write_directory
from agentloop.collect import Actors
from agentloop.config import RunConfig
from agentloop.console import RunDisplay
from agentloop.context_parts import make_parser, make_strategy
from agentloop.environments import EnvironmentFactory, TaskSource, load_environment, open_tasks
from agentloop.errors import UserError
from agentloop.estimator import Estimator
from agentloop.generation import LocalGenerator
from agentloop.learners import Beginning, Leader, Learner, reference_policy
from agentloop.learning.trainer import Trainer
from agentloop.models.actor import Actor
from agentloop.models.adapters import load_policy
from agentloop.models.load import LoadedModel, load_model, quiet
from agentloop.models.reward_model import SequenceClassifier
from agentloop.models.tiny import build_tiny_model
from agentloop.penalty import Penalty, reward_penalty
from agentloop.publish import Publisher
from agentloop.ranks import ALONE, Ranks
from agentloop.rewards import RewardScorer
from agentloop.run_folder import RunFolder
from agentloop.seeds import derive_seed
from agentloop.sinks import SinkFan, load_sinks
from agentloop.startup_checks import check_scoring, check_tools
from agentloop.valuation import Valuation, asked_again
from agentloop.warm_up import Demonstrator, demonstrations, warm_up
from context import AuthorTable
from context.verdict import check_template
from replay.mixing.mixer import Mixer
from replay.sampling.samplers import Sampler
from replay.storage.retention import Capacity
from replay.storage.write import Admission
from replay.store import ReplayStore

_CORPUS_CONVERSATIONS = 400
_WARM_UP = "warm_up.json"


@dataclass(frozen=True)
class Parts:
    """Everything the loop conducts."""

    config: RunConfig
    folder: RunFolder
    store: ReplayStore
    admission: Admission
    capacity: Capacity
    sampler: Sampler
    mixer: Mixer
    source: TaskSource
    actors: Actors
    generator: LocalGenerator
    trainer: Learner
    publisher: Publisher
    sinks: SinkFan
    display: RunDisplay
    authors: AuthorTable
    valuation: Valuation
    fingerprint: Mapping[str, str | int]
    scores_are_stored: bool
    """Behavior log-probs of what the policy as it is sampled are its old ones."""

    @property
    def run_id(self) -> str:
        return self.folder.run_id

    def close(self) -> None:
        self.sinks.close()
        self.store.close()


def starting_model(folder: RunFolder, display: RunDisplay) -> Path | str:
    """Where the run's first weights are; the built-in model is made and warmed up at first use."""
    config = folder.config
    if config.model.path is not None:
        return config.model.path
    if not (folder.model / COMPLETE).exists():
        write_directory(folder.model, lambda target: _make_tiny(target, config, display))
    return folder.model


def _make_tiny(target: Path, config: RunConfig, display: RunDisplay) -> None:
    section = config.warm_up
    options = {**config.environment.options, **section.options}
    factory = load_environment(config.environment.name, options, config.context.registered_authors())
    if not factory.can_demonstrate:
        raise UserError(
            f"model.path must name a model, got null: environment {config.environment.name!r} has no demonstrate() "
            "to warm the built-in model up with. Write one, or set model.path."
        )
    display.note(f"making and warming up the built-in model, once, for {target.parent}")
    seed = derive_seed(config.run.seed, "warm-up")
    display.phase("tokenizer", 0, 1)
    began = time.perf_counter()
    with quiet():
        build_tiny_model(target, config.tiny, corpus=_corpus(factory, seed), seed=seed % 2**31)
    loaded = load_model(config.model, target)
    authors = config.context.author_table()
    parser = make_parser(config.context.parser, loaded.template.source)
    strategy = make_strategy(config.context.strategy, config.context.options)
    result = warm_up(
        Actor(loaded.model, compute=config.compute),
        Demonstrator(loaded, authors, parser, factory=factory, strategy=strategy),
        demonstrations(factory, seed=seed, strategy=strategy),
        section,
        authors=authors,
        told=lambda update, loss: display.phase("warm-up", update, section.max_updates),
    )
    display.note(f"warm-up: {result.updates} updates, copying loss {result.loss:.3f}")
    with quiet():
        loaded.model.save_pretrained(target)
    seconds = time.perf_counter() - began
    measured = {"warm_up/updates": result.updates, "warm_up/loss": result.loss, "time/warm_up": seconds}
    (target / _WARM_UP).write_text(json.dumps(measured))


def warm_up_metrics(folder: RunFolder) -> dict[str, float]:
    """What the warm-up of the built-in model took; nothing for a model that came trained."""
    path = folder.model / _WARM_UP
    measured: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return measured


def _corpus(factory: EnvironmentFactory, seed: int) -> list[str]:
    """What the tokenizer is trained on: demonstrated conversations, and the tools as the prompt shows them."""
    conversations = itertools.islice(demonstrations(factory, seed=seed), _CORPUS_CONVERSATIONS)
    texts = [json.dumps(tool["function"]) for tool in factory.tools] * 20
    for conversation in conversations:
        for message in conversation:
            texts.append(message.content)
            texts += [json.dumps({"name": call.name, "arguments": dict(call.arguments)}) for call in message.tool_calls]
    return texts


def assemble(
    folder: RunFolder,
    display: RunDisplay,
    *,
    checkpoint: Checkpoint | None,
    first: Path | str,
    ranks: Ranks = ALONE,
    environment_changed: bool = False,
) -> Parts:
    """Load the weights (the checkpoint's, or the first ones) and connect everything.

    On several `ranks` this is for rank 0: `learners.follow` is what the others do. Raises UserError where the
    environment's source is not the run's, unless `environment_changed`.
    """
    config = folder.config
    factory, source = open_tasks(config, folder.environments, environment_changed=environment_changed)
    if source.summary is not None:
        display.note(f"tasks: {source.summary}")
    if config.advantage.credit == "turn" and not factory.rewards_turns:
        raise UserError(
            f"advantage.credit must be trajectory when the environment has no turn_rewards, got turn with "
            f"{factory.where}. Write def turn_rewards(self, task, messages)."
        )
    admission = make_admission(config.replay)
    saved = checkpoint.model if checkpoint else None
    loaded = load_policy(config, first, saved=saved)
    _keep_tokenizer(loaded, folder)
    authors = config.context.author_table()
    version = checkpoint.values["loop"]["iteration"] if checkpoint else 0
    generator = LocalGenerator(loaded.model, stop_ids=loaded.stop_ids, policy_version=version, compute=config.compute)
    actor = Actor(loaded.model, packs=config.batch.layout == "packed", compute=config.compute)
    agree = check_scoring(generator, actor)
    display.note(f"chat template: {check_template(loaded.files).summary()}")
    reference = reference_policy(config, first, actor)
    trainer: Learner
    if ranks.several:
        beginning = Beginning(config, first, saved, authors)
        trainer = leader = Leader(beginning, ranks, copy=loaded.model, reference=reference)
        gather = leader.publish
    else:
        trainer, gather = Trainer(actor, config, authors=authors, reference=reference), None
    sinks = load_sinks(config.metrics.sinks, folder.path, warn=display.note, keep_through=version)
    store = ReplayStore.create(folder.database)
    return Parts(
        config=config,
        folder=folder,
        store=store,
        admission=admission,
        capacity=config.replay.capacity,
        sampler=load_sampler(config.replay, derive_seed(config.run.seed, "sampler")),
        mixer=Mixer(config.mix_rule()),
        source=source,
        actors=make_actors(config, factory, loaded, generator),
        generator=generator,
        trainer=trainer,
        publisher=Publisher(loaded, generator, store, folder=folder.path, run=folder.run_id, gather=gather),
        sinks=SinkFan(sinks, warn=display.note),
        display=display,
        authors=authors,
        valuation=_valuation(config, factory, store, reward_penalty(config, reference, authors, trainer.kl_coef)),
        fingerprint=loaded.fingerprint,
        scores_are_stored=agree and config.compute.old_log_probs == "auto",
    )


def make_actors(
    config: RunConfig, factory: EnvironmentFactory, loaded: LoadedModel, generator: LocalGenerator
) -> Actors:
    """What episodes are run with, in training and in evaluation alike."""
    section = config.context
    authors = section.author_table()
    parser = make_parser(section.parser, loaded.template.source)
    check_tools(factory, loaded, parser)
    return Actors(
        factory,
        generator,
        loaded.renderer(authors),
        parser,
        authors,
        loaded.model.config.get_text_config().vocab_size,
        make_strategy(section.strategy, section.options),
        section.training_control(),
    )


def _keep_tokenizer(loaded: LoadedModel, folder: RunFolder) -> None:
    """The run must stay readable when the model's own folder is gone."""
    if not (folder.model / COMPLETE).exists():
        write_directory(folder.model, loaded.tokenizer.save_pretrained)


def _valuation(
    config: RunConfig, factory: EnvironmentFactory, store: ReplayStore, penalty: Penalty | None
) -> Valuation:
    section = config.reward
    model = None if section.model.path is None else SequenceClassifier(section.model, config.model)
    return Valuation(
        RewardScorer(section, max_tokens=config.context.max_tokens, model=model),
        Estimator(config, config.context.author_table(), asked_again(factory, store)),
        penalty,
    )
