"""Conversations of a file as training sequences, in the context that the policy will sample in."""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentloop.config import RunConfig
from agentloop.config.sections.context import ContextSection, make_strategy
from agentloop.environments import open_tasks
from agentloop.errors import UserError
from agentloop.models.loading import LoadedModel
from agentloop.rollouts.actors import make_parser
from context import TokenSequence, loss_mask
from context.messages import Message, shown_messages
from context.strategies import Strategy
from context.templates.hidden_parts import hidden_tools
from context.templates.render import Renderer
from context.wording import excerpt
from replay.errors import ReplayError
from replay.exchange.files import lines
from replay.exchange.json_text import BadRow
from replay.exchange.openai_chat import Conversation, TooLong, read_line, record_conversation

_CORPUS_CONVERSATIONS = 4000


@dataclass(frozen=True)
class Demonstration:
    """One conversation. It has several sequences if its template or the strategy rewrites earlier text."""

    digest: str
    """Digest of the line in the file."""
    sequences: tuple[TokenSequence, ...]


@dataclass
class Demonstrations:
    read: list[Demonstration] = field(default_factory=list)
    too_long: int = 0
    """Number of conversations too long for the context, which are left out: a cut one would teach to stop anywhere."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Fields of the file that are not used, with their counts."""


def read_demonstrations(path: Path, config: RunConfig, loaded: LoadedModel, *, key: str) -> Demonstrations:
    """Read every conversation of the file; `key` names it in errors. Raises UserError with the first bad line.

    Replies of weight 1 get the author `demonstration`, which is trained. Replies of weight 0 are only shown.
    """
    section, found = config.context, Demonstrations()
    renderer = loaded.renderer(section.author_table(), allow_hidden=section.allow_hidden_tools)
    strategy = make_strategy(section.strategy, section.options)
    for place, line, conversation in _conversations(path, key, found.ignored):
        try:
            sequences = _sequences(conversation, section, renderer, strategy)
        except TooLong:
            found.too_long += 1
            continue
        except ValueError as error:
            raise UserError(f"{place}: {error}") from error
        found.read.append(Demonstration(hashlib.sha256(line.strip()).hexdigest(), tuple(sequences)))
    if not found.read:
        raise UserError(
            f"{key} must hold a conversation of at most context.max_tokens={section.max_tokens} tokens, got none in "
            f"{str(path)!r} ({found.too_long} longer ones). Raise it, or name another file."
        )
    return found


def _sequences(
    conversation: Conversation, section: ContextSection, renderer: Renderer, strategy: Strategy
) -> list[TokenSequence]:
    named = section.parser != "auto"
    if conversation.tools and not section.allow_hidden_tools:
        opening = shown_messages(conversation.opening, renderer.authors)
        problem = hidden_tools(renderer.template, conversation.tools, opening, described=named)
        if problem is not None:
            raise BadRow(problem)
    context = record_conversation(
        conversation,
        renderer,
        max_tokens=section.max_tokens,
        parser=make_parser(section.parser, renderer.template, tools=conversation.tools) if named else None,
        strategy=strategy,
    )
    sequences = [segment.tokens for segment in context.segments()]
    return [tokens for tokens in sequences if loss_mask(tokens, renderer.authors).any()]


def compare_with_environment(config: RunConfig) -> str | None:
    """A remark where `sft.data` shows other tools or another system message than the environment.

    The default environment is not compared, because it may not be meant. Raises UserError where the environment has
    none of the data's tools.
    """
    if config.environment.name == RunConfig().environment.name and not config.environments:
        return None
    try:
        environments, source = open_tasks(config)
    except UserError as problem:  # sft itself needs no environment
        return f"demonstrations were not compared with the environment: {problem}"
    tools = [_by_name(one.tools_for(task)) for one in environments.all for task in one.all_examples]
    systems = {_system(source.train(index).messages()) for index in range(32)}
    total, known, named, different = 0, {name for one in tools for name in one}, set[str](), list[str]()
    for place, _, found in _conversations(Path(str(config.sft.data)), "sft.data", Counter()):
        total, own, system = total + 1, _by_name(found.tools), _system(found.opening)
        named |= own.keys() | {call.name for reply, _ in found.turns for call in reply.message.tool_calls}
        if own not in tools:
            name = next(name for name in {**tools[0], **own} if own.get(name) != tools[0].get(name))
            how = "is not shown" if name not in own else "is described otherwise" if name in known else "is not its own"
            different.append(f"{place}, tool {name} {how}")
        elif system not in systems and len(systems) <= len(tools):  # otherwise each task has its own system message
            different.append(f"{place}, the system message is {excerpt(repr(system), 60)}")
    if named and not named & known:
        raise UserError(
            f"sft.data must show tools of {environments.where} ({', '.join(sorted(known)) or 'it has none'}), got only "
            f"{', '.join(sorted(named))} in {config.sft.data!r}. Use those of: agentloop env check CONFIG --json"
        )
    if not different:
        return None
    return (
        f"{len(different):,} of {total:,} demonstrations differ from what {environments.where} will show: "
        f"{different[0]}. If that is not meant, change them and begin again: agentloop env check CONFIG --json"
    )


def _by_name(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {function["name"]: function for function in (tool.get("function", tool) for tool in tools)}


def _system(messages: Sequence[Message]) -> str:
    return "\n".join(message.content for message in messages if message.role == "system")


def conversation_texts(path: Path, *, key: str) -> list[str]:
    """Texts of the file's first conversations and their tools, to train a tokenizer on."""
    texts: list[str] = []
    for _, _, found in itertools.islice(_conversations(path, key, Counter()), _CORPUS_CONVERSATIONS):
        for message in found.messages:
            texts += [message.content, message.reasoning or ""]
            texts += [json.dumps({"name": call.name, "arguments": dict(call.arguments)}) for call in message.tool_calls]
        texts += [json.dumps(tool.get("function", tool)) for tool in found.tools]
    return texts


def _conversations(path: Path, key: str, ignored: Counter[str]) -> Iterator[tuple[str, bytes, Conversation]]:
    """Yield place, line and conversation for every line that is not empty."""
    try:
        for number, line in enumerate(lines(path), 1):
            if line.strip():
                try:
                    found = read_line(line, ignored)
                except ValueError as error:
                    raise UserError(f"{path}:{number}: {error}") from error
                yield f"{path}:{number}", line, found
    except (ReplayError, BadRow) as error:
        raise UserError(f"{key} must be a readable .jsonl file, got {str(path)!r}: {error}") from error
