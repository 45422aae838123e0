"""What no engine enforces is asked of the policy in its prompt; texts that end a reply, and log-probs, are exact."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentloop.gateway import anthropic_messages, chat_completions, openai_responses
from agentloop.gateway.agent_request import AgentReply, AgentRequest, BadRequest
from agentloop.gateway.agent_sessions import AgentSession
from agentloop.records import Completion, GenerationFailed
from context import Message
from context.conversation_tree import Prompt
from tests.agentloop.gateway.test_official_clients import TOOL
from tests.agentloop.gateway.test_refused_requests import BODIES, CHAT, MESSAGES, RESPONSES, post
from tests.agentloop.gateway.test_stored_sessions import MODEL, POLICY
from tests.fakes.agent_sessions import Gateway
from tests.fakes.random_agents import TODAY

SCHEMA = {"type": "object", "properties": {"stone": {"type": "string"}}}
AS_JSON = 'with JSON of this schema and nothing else: {"type": "object", "properties": {"stone": {"type": "string"}}}'
JSON_SCHEMA = {"type": "json_schema", "name": "Found", "schema": SCHEMA, "strict": True}
OPENAI = {"tools": [{"type": "function", "function": TOOL}]}
FLAT = {"tools": [{"type": "function", **TOOL}]}
CLAUDE = {"tools": [{"name": "look", "input_schema": {"type": "object"}}]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "Found", "schema": SCHEMA}}
SINGLE = {"type": "any", "disable_parallel_tool_use": True}
ONE = "Call at most one tool in a reply."
INSTRUCTED: list[tuple[str, dict[str, Any], str, list[str]]] = [
    (CHAT, {"response_format": FORMAT}, "response_format", [f"Reply {AS_JSON}"]),
    (
        CHAT,
        {**OPENAI, "response_format": {"type": "json_object"}, "tool_choice": "required"},
        "response_format, tool_choice",
        ["If you call no tool, reply with a JSON object and nothing else.", "Reply with a call of a tool."],
    ),
    (
        CHAT,
        {**OPENAI, "tool_choice": {"type": "function", "function": {"name": "look"}}, "temperature": 0},
        "temperature, tool_choice.type",
        ["Reply with a call of the tool look."],
    ),
    (CHAT, {**OPENAI, "parallel_tool_calls": False}, "parallel_tool_calls", [ONE]),
    (RESPONSES, {"text": {"format": JSON_SCHEMA}}, "text.format", [f"Reply {AS_JSON}"]),
    (RESPONSES, {**FLAT, "tool_choice": "required"}, "tool_choice", ["Reply with a call of a tool."]),
    (
        RESPONSES,
        {**FLAT, "tool_choice": {"type": "function", "name": "look"}},
        "tool_choice.type",
        ["Reply with a call of the tool look."],
    ),
    (MESSAGES, {"output_config": {"format": JSON_SCHEMA}}, "output_config.format", [f"Reply {AS_JSON}"]),
    (
        MESSAGES,
        {**CLAUDE, "tool_choice": SINGLE},
        "tool_choice.disable_parallel_tool_use, tool_choice.type",
        ["Reply with a call of a tool.", ONE],
    ),
    (
        MESSAGES,
        {**CLAUDE, "tool_choice": {"type": "tool", "name": "look"}},
        "tool_choice.type",
        ["Reply with a call of the tool look."],
    ),
]


@pytest.mark.parametrize(("path", "fields", "names", "instructions"), INSTRUCTED)
def test_wish_that_no_engine_obeys_is_an_instruction_and_named(
    gateway: Gateway, path: str, fields: dict[str, Any], names: str, instructions: list[str]
) -> None:
    response = post(gateway, path, {**BODIES[path], **fields})
    assert response.status_code == 200, response.text
    assert response.headers["x-agentloop-overruled"] == names
    (request,) = gateway.session.requests
    assert request.messages[-1].content == "".join(
        ["Which stone?", *(f"\n\nInstruction: {text}" for text in instructions)]
    )
    assert set(request.instructed) == set(names.split(", ")) - {"temperature"}


def test_instruction_stands_in_the_last_user_message_while_tools_are_called(gateway: Gateway) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    called = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "78"}]
    messages = [*BODIES[CHAT]["messages"], *called]
    post(gateway, CHAT, {**BODIES[CHAT], **OPENAI, "messages": messages, "tool_choice": "required"})
    (request,) = gateway.session.requests
    assert [message.content for message in request.messages] == [
        "Which stone?\n\nInstruction: Reply with a call of a tool.",
        "",
        "78",
    ]


def test_stop_and_log_probs_are_read(gateway: Gateway) -> None:
    for path, fields, stop in (
        (CHAT, {"stop": "END"}, ("END",)),
        (CHAT, {"stop": ["a", "b"], "logprobs": True}, ("a", "b")),
        (MESSAGES, {"stop_sequences": ["\n\nHuman:"]}, ("\n\nHuman:",)),
    ):
        response = post(gateway, path, {**BODIES[path], **fields})
        assert (response.status_code, "x-agentloop-overruled" in response.headers) == (200, False)
        request = gateway.session.requests[-1]
        assert (request.stop, request.log_probs) == (stop, "logprobs" in fields)


def answered(said: str | Sequence[int], *, policy: Any = POLICY, **wishes: Any) -> tuple[AgentSession, AgentReply]:
    """A session after one request, whose reply the engine ended behind this text."""

    async def ask(request: AgentRequest, number: int, prompt: Prompt, most: int) -> Completion:
        ids = MODEL.codec.encode(said) if isinstance(said, str) else said
        return Completion(tuple(ids), (-0.5,) * len(ids), 0)

    request = AgentRequest("policy", "", False, (Message("user", "Where?"),), [], None, False, (), {}, **wishes)
    session = AgentSession("s", policy, ask, now=TODAY)
    return session, asyncio.run(session.reply(request, asyncio.Future(loop=asyncio.new_event_loop())))


def test_reply_ends_before_the_text_that_ended_it_and_the_row_keeps_every_token() -> None:
    session, reply = answered("At sea.\nObservation: it", stop=("END", "Observation: it"), log_probs=True)
    assert (reply.message.content, reply.finish, reply.stop) == ("At sea.\n", "stop", "Observation: it")
    (node,) = session.tree.nodes
    sampled = MODEL.codec.encode("At sea.\nObservation: it")
    assert node.tokens.token_ids[-node.num_sampled :].tolist() == sampled
    assert reply.log_probs == tuple((MODEL.codec.decode([token]), -0.5) for token in sampled)
    request = replace(anthropic_messages.read(BODIES[MESSAGES]), stop=("Observation: it",))
    answer = anthropic_messages.answer(request, reply)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "Observation: it")
    assert b'"stop_sequence":"Observation: it"' in list(anthropic_messages.events(request, reply))[-2]
    chat = chat_completions.read({**BODIES[CHAT], "logprobs": True})
    scored = chat_completions.answer(chat, reply)["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["logprob"]) for one in scored] == list(reply.log_probs)
    assert b'"logprob":-0.5' in list(chat_completions.events(chat, reply))[-2]
    assert openai_responses.answer(openai_responses.read(BODIES[RESPONSES], lambda _: None), reply)


@pytest.mark.parametrize("seed", range(20))
def test_row_has_the_tokens_that_the_engine_sampled_until_a_stop(seed: int) -> None:
    rng = random.Random(seed)
    stop = tuple("".join(rng.choices("ab \n", k=rng.randrange(1, 3))) for _ in range(2))
    said, codec = list[int](), MODEL.codec
    for token in codec.encode("".join(rng.choices(["a", "b", "c", " ", "\n", "Observation"], k=40))):
        said.append(token)
        if any(text in codec.decode(said) for text in stop):
            break
    _, reply = answered(said, stop=stop, log_probs=True)
    whole = codec.decode(said)
    assert [text for text, _ in reply.log_probs or ()] == [codec.decode([token]) for token in said]
    ends = min((whole.find(text) for text in stop if text in whole), default=len(whole))
    assert (reply.message.content, reply.finish) == (whole[:ends], "stop" if ends < len(whole) else "length")
    assert reply.stop is None or whole.startswith(reply.stop, ends)


def test_engine_that_goes_on_behind_a_stop_gives_no_reply() -> None:
    with pytest.raises(
        GenerationFailed, match="the engine must end a reply at its stop, got more tokens after 'At sea"
    ):
        answered("At sea. END And more.", stop=("END",))


def test_reply_cut_by_its_limit_is_not_ended_by_a_stop_that_it_lacks() -> None:
    _, reply = answered("At sea.", stop=("END",))
    assert (reply.message.content, reply.finish, reply.stop) == ("At sea.", "length", None)


def test_instructions_are_refused_by_name_where_the_run_says_so() -> None:
    strict = replace(POLICY, unsupported="refuse")
    with pytest.raises(BadRequest, match="^response_format must be left out where gateway.unsupported is refuse"):
        answered("At sea.", policy=strict, instructed=("response_format",))
    answered("At sea.", policy=strict)
