"""What would spoil a run in silence is looked for before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agentloop.environments import EnvironmentFactory
from agentloop.errors import UserError
from agentloop.generation import GenerationRequest, LocalGenerator
from agentloop.models.actor import Actor
from agentloop.models.load import LoadedModel
from context import Message, ReactParser, ReplyParser, ToolCall

_TOLERANCE, _HALF_TOLERANCE = 1e-3, 0.5
"""Nats between sampling and scoring. Half precision rounds differently in batches of other shapes."""
_EXAMPLES: dict[str, Any] = {"string": "a", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}


def check_tools(factory: EnvironmentFactory, loaded: LoadedModel, parser: ReplyParser) -> None:
    """The chat template shows the tools, and the parser reads the calls it writes."""
    if not factory.tools or isinstance(parser, ReactParser):
        return  # ReAct calls are described by the environment's own prompt, not by the template
    user = Message("user", "x")
    start = loaded.template.render([user], tools=factory.tools, generation_prompt=True)
    _check_shown(factory, loaded, (user,))
    if factory.example is not None:
        _check_shown(factory, loaded, factory.example.messages())
    call = _example_call(factory.tools[0])
    reply = Message("assistant", "", author="initialization", tool_calls=(call,))
    whole = loaded.template.render([user, reply], tools=factory.tools, generation_prompt=False)
    written = whole.removeprefix(start)
    end = loaded.codec.first_of(loaded.stop_ids & loaded.codec.added_ids, written)
    if end is not None:
        written = written[: end[1]].removesuffix(loaded.codec.decode([end[0]]))
    read = parser.parse(written, stopped=True)
    if [found.name for found in read.message.tool_calls] != [call.name]:
        raise UserError(
            f"context.parser must read the tool calls that the model's chat template writes, got {read.outcome!r} for "
            f"{written[:80]!r}. Name another one, or a class of your own."
        )


def _check_shown(factory: EnvironmentFactory, loaded: LoadedModel, opening: Sequence[Message]) -> None:
    """Some templates leave tools out, of all prompts or of those that open in their own way, with a system message."""
    prompt = loaded.template.render(opening, tools=factory.tools, generation_prompt=True)
    without = loaded.template.render(opening, generation_prompt=True)
    names = [str(tool["function"]["name"]) for tool in factory.tools]
    hidden = [name for name in names if prompt.count(name) <= without.count(name)]
    if hidden:
        roles = ", ".join(message.role for message in opening)
        raise UserError(
            f"model.path must have a chat template that shows tools, got one that leaves {', '.join(hidden)} out of a "
            f"prompt with the roles [{roles}]. Use a model that was trained to call tools, or describe them in the "
            "task's prompt and set context.parser: react."
        )


def _example_call(tool: Any) -> ToolCall:
    schema = tool["function"]
    properties: dict[str, Any] = schema.get("parameters", {}).get("properties", {})
    arguments = {name: _EXAMPLES.get(str(value.get("type")), "a") for name, value in properties.items()}
    return ToolCall(schema["name"], arguments, "call00001")


def check_scoring(generator: LocalGenerator, actor: Actor) -> bool:
    """Log-probs from sampling are those from scoring, over two turns and ragged prompts. True: to 0.001 nats, for sure.

    Some architectures keep a state that the generation's cache does not know of; their stored log-probs would be
    wrong, and every ratio with them. Where only autocast rounds to 16 bits, they must agree to 0.001 nats without it.
    """
    if actor.compute.autocast != "none":
        exact = actor.compute.model_copy(update={"autocast": "none", "compile": False})
        check_scoring(generator.with_compute(exact), Actor(actor.model, packs=actor.packs, compute=exact))
    prompts = {0: [3, 4, 5, 6, 7], 1: [5, 3]}
    worst = 0.0
    generator.begin(seed=0, temperature=1.0)
    for _ in range(2):
        requests = [GenerationRequest(episode, ids, 4) for episode, ids in prompts.items()]
        completions = list(generator.generate(requests))
        rows = [[*request.prompt_ids, *said.token_ids] for request, said in zip(requests, completions, strict=True)]
        worst = max(worst, _difference(actor, rows, [said.log_probs for said in completions]))
        prompts = {request.episode: [*row, 8, 9] for request, row in zip(requests, rows, strict=True)}
    limit = _HALF_TOLERANCE if actor.half_precision else _TOLERANCE
    if not worst <= limit and actor.packs:
        raise UserError(
            f"batch.layout must be padded for a model that does not tell rows apart by their positions, got packed and "
            f"log-probs that differ by {worst:.3g} nats with {type(actor.model).__name__}. Set batch.layout: padded."
        )
    if not worst <= limit:
        raise UserError(
            f"model.path must give the same log-probs when sampling and when scoring (within {limit} nats), got a "
            f"difference of {worst:.3g} with {type(actor.model).__name__}. Use another architecture."
        )
    return worst <= _TOLERANCE and not actor.half_precision


def _difference(actor: Actor, rows: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> float:
    """Largest one of the last tokens of each row, all rows scored at once."""
    width = max(map(len, rows))
    tokens = torch.zeros((len(rows), width), dtype=torch.int64)
    there, sampled = torch.zeros((2, len(rows), width), dtype=torch.bool)
    for position, (row, known) in enumerate(zip(rows, log_probs, strict=True)):
        tokens[position, : len(row)] = torch.tensor(row)
        there[position, : len(row)] = True
        sampled[position, len(row) - len(known) : len(row)] = True
    tokens, there, sampled = (array.to(actor.device) for array in (tokens, there, sampled))
    with torch.no_grad():
        again, _ = actor.log_probs(tokens, there, sampled, torch.ones(len(rows), device=actor.device), entropy=False)
    stored = torch.tensor([value for known in log_probs for value in known], dtype=again.dtype, device=again.device)
    return float((again[sampled] - stored).abs().max())
