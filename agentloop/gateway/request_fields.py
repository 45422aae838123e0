"""The fields of requests: which are read, which the run's settings override, and which are refused."""

import json
import marshal
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import Any

from agentloop.gateway.agent_request import AgentRequest, BadRequest
from context.conversation_tree import INSTRUCTION
from context.messages import Message
from context.openai_messages import read_message
from context.templates.chat_template import RenderError
from context.templates.rendering.contents import checked_name
from context.wording import excerpt

MODEL = "policy"
ASIDE = "aside"
_MODEL = re.compile(rf"{MODEL}(?:/(?P<agent>[A-Za-z0-9._:-]{{1,64}}))?|{ASIDE}")

OVERRULED = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"}
    | {"frequency_penalty", "presence_penalty", "repetition_penalty"}
    | {"reasoning", "reasoning_effort", "thinking", "verbosity", "text.verbosity", "output_config.effort"}
    | {"context_management", "chat_template_kwargs"}
)
"""Fields about sampling, the template, or shortening the prompt at the provider. The run's settings decide these."""
_HARMLESS = frozenset(
    {"user", "metadata", "store", "stream_options", "service_tier", "safety_identifier", "prediction", "max_tool_calls"}
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_control", "client_metadata"}
    | {"diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id"}
)
"""Fields that change nothing in a reply."""
_FORMATS = ("response_format", "text.format", "output_config.format")
_CHOICES = ("tool_choice", "tool_choice.type")
_SINGLE = {"parallel_tool_calls": False, "tool_choice.disable_parallel_tool_use": True}
"""The values that forbid several calls in a reply."""
_INSTRUCTED = (*_FORMATS, *_SINGLE, *_CHOICES)
"""Fields that no engine obeys. Their instructions have this order: what frameworks drop after a first call is last."""
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "modalities": (["text"],),
    "top_logprobs": (0,),
    "background": (False,),
    "truncation": ("disabled",),
    "include": ([], ["reasoning.encrypted_content"]),
}
"""Fields with a single meaning here, and the values that stand for it."""
_OBJECTS = ("text", "output_config", "tool_choice")

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_BY_ROLE = {"assistant": ("content", "tool_calls", "reasoning_content"), "tool": ("content", "name", "tool_call_id")}
_NOT_READ = ("function_call", "audio", "refusal")
_MARKS = frozenset({"role", "type", "id", "status", "annotations", "cache_control"})
"""Fields of messages and tools that hold nothing to show a policy."""
_TOOL_FIELDS = frozenset({"name", "description", "parameters", "input_schema", "tools"})
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_WHERE = "messages[0]"
_LONG = 2**13
"""Bytes from which on a message is not cached."""


def agent_request(
    body: Mapping[str, Any],
    rows: Sequence[tuple[int, Any]],
    tools: list[dict[str, Any]],
    *,
    limits: Collection[str] = (),
    read: Collection[str] = (),
    field: str = "messages",
) -> AgentRequest:
    """Read a request from its body.

    `rows` are the messages in OpenAI's form, each with its index in `field`. `limits` are the fields that limit the
    reply's tokens, and `read` the other fields of the protocol.
    """
    choice, stop_field = body.get("tool_choice"), "stop" if "stop" in read else "stop_sequences"
    kind = choice.get("type") if isinstance(choice, dict) else choice
    tools = [] if kind == "none" else tools
    agent, aside = read_agent(body.get("model"))
    named = ("tool_choice.name", "tool_choice.function") if kind in ("function", "tool") else ()
    overruled = _find_overruled(body, {"model", "messages", "tools", "stream", *limits, *read, *named})
    asked = _read_instructions(body, tools)
    if not rows:
        raise wrong(field, "a list of at least one message", body.get(field))
    messages = tuple(_order_by_calls(_message(f"{field}[{index}]", row) for index, row in rows))
    for _, row in rows:
        overruled |= _not_shown(field, [row], _BY_ROLE.get(row["role"], ("content",)))
    overruled |= _not_shown("tools", (tool.get("function", tool) for tool in body.get("tools") or ()), _TOOL_FIELDS)
    if messages[-1].role == "assistant":
        raise wrong(f"{field}[{rows[-1][0]}].role", "user in the last message: no reply is begun here", "assistant")
    return AgentRequest(
        model=body["model"],
        agent=agent,
        aside=aside,
        messages=messages if aside else _add_instructions(messages, asked.values()),
        tools=tools,
        max_tokens=min((_limit(name, body[name]) for name in limits if body.get(name) is not None), default=None),
        stream=flag("stream", body.get("stream")),
        overruled=tuple(sorted(overruled | asked.keys())),
        instructed=() if aside else tuple(asked),
        stop=tuple(_read_stop(stop_field, body.get(stop_field))),
        log_probs="logprobs" in read and flag("logprobs", body.get("logprobs")),
        body=body,
    )


def wrong(field: str, rule: str, value: Any) -> BadRequest:
    field = excerpt(field, 80)
    return BadRequest(400, f"{field} must be {rule}, got {_shown(value)}.", field)


def read_list(field: str, value: Any) -> list[Any]:
    """Read a list; a field that is left out is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong(field, "a list", value)
    return value


def read_blocks(field: str, content: Any) -> list[dict[str, Any]]:
    """Read the parts of a content; a text is one part."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    blocks = read_list(field, content)
    for index, block in enumerate(blocks):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise wrong(f"{field}[{index}]", "an object with a type", block)
    return blocks


def read_tools(value: Any, kinds: Collection[str | None], schema: str = "parameters") -> list[dict[str, Any]]:
    """Read tools into OpenAI's form, as the model sees them. `kinds` are the types of the agent's own functions."""
    return [read_tool(f"tools[{index}]", tool, kinds, schema) for index, tool in enumerate(read_list("tools", value))]


def read_tool(where: str, tool: Any, kinds: Collection[str | None], schema: str = "parameters") -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") not in kinds:
        got = tool.get("type") if isinstance(tool, dict) else tool
        raise wrong(f"{where}.type", "that of a function, which the agent calls itself", got)
    given = tool.get("function", tool)
    if not isinstance(given, dict):
        raise wrong(f"{where}.function", "an object", given)
    named: dict[str, Any] = {"name": read_name(f"{where}.name", given.get("name"))}
    for key, taken, kind in (("description", "description", str), ("parameters", schema, dict)):
        value = given.get(taken)
        if value is not None and not isinstance(value, kind):
            raise wrong(f"{where}.{taken}", "text" if kind is str else "an object", value)
        if value is not None:
            named[key] = value
    return {"type": "function", "function": named}


def _message(where: str, row: Any) -> Message:
    role = row.get("role") if isinstance(row, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{where}.role", "system, developer, user, assistant or tool", role)
    for key in _NOT_READ:
        if row.get(key) is not None:
            raise wrong(f"{where}.{key}", "left out", row[key])
    kept = {key: row.get(key) for key in _BY_ROLE.get(_ROLES[role], ("content",))}
    packed = marshal.dumps({"role": _ROLES[role], **kept}, 2)  # bytes as the cache's key: values would take 1 for true
    try:
        return _read_cached_message(packed) if len(packed) < _LONG else _read_message(packed)
    except (RenderError, ValueError) as problem:
        text = str(problem).replace(_WHERE, where, 1)
        raise BadRequest(400, text, text.partition(" must ")[0]) from None


def _order_by_calls(messages: Iterable[Message]) -> Iterator[Message]:
    """Put tool results in the order of their calls: most templates show no ids."""
    places: dict[str | None, int] = {}
    for are_results, group in groupby(messages, key=lambda message: message.role == "tool"):
        found = list(group)
        if are_results and all(message.tool_call_id in places for message in found):
            found.sort(key=lambda message: places[message.tool_call_id])
        yield from found
        places = {call.id: place for place, call in enumerate(found[-1].tool_calls)}


def _not_shown(field: str, given: Iterable[Any], read: Collection[str]) -> set[str]:
    """Return the names of fields that hold something the policy is not shown."""
    items = [item for one in given if isinstance(one, dict) for item in one.items()]
    unseen = {key for key, value in items if value and key not in read and key not in _MARKS}
    return {f"{field}.{key if _WORD.fullmatch(key) else '?'}" for key in unseen}


def _read_message(packed: bytes) -> Message:
    message = read_message(0, marshal.loads(packed))
    for place, call in enumerate(message.tool_calls):
        checked_name(f"{_WHERE}.tool_calls[{place}].name", call.name)
    checked_name(f"{_WHERE}.name", "none" if message.name is None else message.name)
    return message


_read_cached_message = lru_cache(2048)(_read_message)
"""Reads a message from a cache: an agent sends its whole conversation each time."""


def read_name(field: str, name: Any) -> str:
    try:
        return checked_name(field, name)
    except ValueError as problem:
        raise BadRequest(400, str(problem), field) from None


def read_agent(model: Any) -> tuple[str, bool]:
    found = _MODEL.fullmatch(model) if isinstance(model, str) else None
    if found is None:
        raise BadRequest(
            404,
            f"model must be {MODEL}, {MODEL}/NAME or {ASIDE}, got {_shown(model)}. NAME is what the agent is called: "
            "at most 64 letters, digits and . _ : -",
            "model",
            "model_not_found",
        )
    return found["agent"] or "", model == ASIDE


def _find_overruled(body: Mapping[str, Any], read: Collection[str]) -> set[str]:
    """Return the overruled fields. Raises BadRequest for a field that the reply could not obey."""
    overruled = set()
    for name, value in _fields(body):
        if name in OVERRULED:
            overruled.add(name)
        elif name in _ONLY:
            if not any(value == one and type(value) is type(one) for one in _ONLY[name]):
                raise wrong(name, " or ".join(map(_shown, _ONLY[name])) + ", or left out", value)
        elif name not in read and name not in _HARMLESS and name not in _INSTRUCTED:
            raise wrong(name, "left out", value)
    return overruled


def _read_instructions(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Write the fields that no engine obeys as instructions to the policy, by field."""
    given, found = dict(_fields(body)), dict[str, str | None]()
    for name in (name for name in _INSTRUCTED if name in given):
        if name in _FORMATS:
            found[name] = _format_instruction(name, given[name], "If you call no tool, reply" if tools else "Reply")
        elif name in _CHOICES:
            found[name] = _choice_instruction(body["tool_choice"], [tool["function"]["name"] for tool in tools])
        elif flag(name, given[name]) is _SINGLE[name] and tools:
            found[name] = "Call at most one tool in a reply."
    return {name: text for name, text in found.items() if text is not None}


def _format_instruction(field: str, value: Any, reply: str) -> str | None:
    kind, schema = (value.get("type"), value.get("json_schema", value)) if isinstance(value, dict) else (None, None)
    schema = schema.get("schema") if isinstance(schema, dict) else None
    if kind == "json_object":
        return f"{reply} with a JSON object and nothing else."
    if kind == "json_schema" and isinstance(schema, dict):
        return f"{reply} with JSON of this schema and nothing else: {json.dumps(schema, ensure_ascii=False)}"
    if kind == "text":
        return None
    raise wrong(field, "of type text, json_object, or json_schema with its schema", value)


def _choice_instruction(choice: Any, tools: Sequence[str]) -> str | None:
    kind, named = (choice.get("type"), choice.get("function", choice)) if isinstance(choice, dict) else (choice, None)
    name = named.get("name") if isinstance(named, dict) else None
    if kind in ("auto", "none"):
        return None
    if kind in ("required", "any") and tools:
        return "Reply with a call of a tool."
    if kind in ("function", "tool") and name in tools:
        return f"Reply with a call of the tool {name}."
    raise wrong("tool_choice", "auto, none, or what an offered tool can fulfil: required, or the tool's name", choice)


def _add_instructions(messages: tuple[Message, ...], instructions: Iterable[str]) -> tuple[Message, ...]:
    """Add instructions to the last user message. It stays the last while tools are called, so no branch begins."""
    at = max((n for n, message in enumerate(messages) if message.role == "user"), default=len(messages) - 1)
    text = "".join(INSTRUCTION + one for one in instructions)
    return (*messages[:at], replace(messages[at], content=messages[at].content + text), *messages[at + 1 :])


def _read_stop(field: str, value: Any) -> Iterator[str]:
    for text in [value] if isinstance(value, str) else read_list(field, value):
        if not isinstance(text, str) or not text:
            raise wrong(field, "a text or a list of texts, none of them empty", value)
        yield text


def _fields(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """List the fields that are set. A field inside an object is named with the object, such as `text.format`."""
    for name, value in body.items():
        if name in _OBJECTS and isinstance(value, dict):
            yield from ((f"{name}.{inner}", one) for inner, one in value.items() if one is not None)
        elif value is not None:
            yield name, value


def _limit(field: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise wrong(field, "an integer above 0", value)
    return value


def flag(field: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise wrong(field, "true or false", value)
    return bool(value)


def _shown(value: Any) -> str:
    return excerpt(json.dumps(value, ensure_ascii=False), 80)
