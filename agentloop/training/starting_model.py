"""The first weights of a run: those that `model.path` names, or the built-in model, warmed up on demonstrations."""

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentloop.config import RunConfig
from agentloop.config.sections.context import make_strategy
from agentloop.config.seeds import derive_seed
from agentloop.environments import RunEnvironments, load_environments, makes_tasks
from agentloop.errors import UserError
from agentloop.models.actor import Actor
from agentloop.models.loading import load_model, muted_libraries
from agentloop.models.tiny import build_tiny_model
from agentloop.rollouts.actors import make_parser
from agentloop.rollouts.demonstrated import demonstrations
from agentloop.runs.checkpoint import write_directory
from agentloop.runs.display import RunDisplay
from agentloop.runs.run_folder import COMPLETE, RunFolder
from agentloop.supervised.warm_up import demonstrated_sequences, warm_up
from context import TokenSequence

_CORPUS_CONVERSATIONS = 400
_WARM_UP = "warm_up.json"


def starting_model(folder: RunFolder, display: RunDisplay) -> Path | str:
    """The place of the run's first weights. The built-in model is made and warmed up at first use."""
    config = folder.config
    if config.model.path is not None:
        return config.model.path
    if not (folder.start / COMPLETE).exists():
        write_directory(folder.start, lambda target: _make_tiny(target, config, display))
    return folder.start


def warm_up_metrics(folder: RunFolder) -> dict[str, float]:
    """Updates, loss and seconds of the built-in model's warm-up; none for another model."""
    path = folder.start / _WARM_UP
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _load_demonstrating(config: RunConfig) -> RunEnvironments:
    """Load the environments for the warm-up. Raises UserError for one that has no demonstrations."""
    without = next((part.environment.name for part in config.parts if not makes_tasks(part.environment.name)), None)
    if without is None:
        environments = load_environments(config, {}, options=config.warm_up.options)
        if environments.define("demonstrate", "make_task"):
            return environments
        without = environments.where
    raise UserError(
        f"model.path must name a model, got null: environment {without!r} has no make_task and demonstrate to warm the "
        "built-in one up with. Name one, for example from agentloop sft, or a class with make_task and demonstrate."
    )


def _make_tiny(target: Path, config: RunConfig, display: RunDisplay) -> None:
    section, context, environments = config.warm_up, config.context, _load_demonstrating(config)
    display.note(f"making and warming up the built-in model, once, for {target.parent}")
    seed = derive_seed(config.run.seed, "warm-up")
    display.phase("tokenizer", 0, 1)
    began = time.perf_counter()
    with muted_libraries():
        build_tiny_model(target, config.tiny, corpus=_corpus_texts(environments, seed), seed=seed % 2**31)
    loaded = load_model(config.model, target, template=context.template, template_args=context.template_args)
    authors = context.author_table()
    parser = make_parser(context.parser, loaded.template, tools=environments.tools)
    strategy, renderer = make_strategy(context.strategy, context.options), loaded.renderer(authors)

    def in_turn() -> Iterator[Sequence[TokenSequence]]:
        """Conversations of each environment in turn, as training sequences."""
        played = [(one, demonstrations(one, seed=seed, strategy=strategy)) for one in environments.all]
        for factory, shown in itertools.cycle(played):
            task, said = next(shown)
            tools = factory.tools_for(task)
            yield demonstrated_sequences(said, renderer, parser=parser, tools=tools, strategy=strategy)

    result = warm_up(
        Actor(loaded.model, compute=config.compute),
        in_turn(),
        section,
        authors=authors,
        control_ids=loaded.codec.added_ids,
        progress=lambda update, loss: display.phase("warm-up", update, section.max_updates),
    )
    least = section.loss_target
    short = f" (above warm_up.loss_target={least:g}: raise warm_up.max_updates)" * (result.loss > least)
    display.note(f"warm-up: {result.updates} updates, copying loss {result.loss:.3f}{short}")
    with muted_libraries():
        loaded.model.save_pretrained(target)
        loaded.tokenizer.save_pretrained(target)  # with the template of `context.template`
    seconds = time.perf_counter() - began
    measured = {"warm_up/updates": result.updates, "warm_up/loss": result.loss, "time/warm_up": seconds}
    (target / _WARM_UP).write_text(json.dumps(measured))


def _corpus_texts(environments: RunEnvironments, seed: int) -> list[str]:
    """Texts to train the tokenizer on: demonstrated conversations, and the tools as prompts show them."""
    texts = []
    for factory in environments.all:
        texts += [json.dumps(tool["function"]) for tool in factory.tools] * 20
        for _, conversation in itertools.islice(demonstrations(factory, seed=seed), _CORPUS_CONVERSATIONS):
            for message in conversation:
                texts.append(message.content)
                texts += [json.dumps({"name": c.name, "arguments": dict(c.arguments)}) for c in message.tool_calls]
    return texts
