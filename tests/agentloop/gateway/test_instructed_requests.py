"""What no engine enforces is asked of the policy in its prompt; texts that end a reply, and log-probs, are exact."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentloop.gateway import anthropic_messages, chat_completions
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

CALL, NAMED, ONE = (
    "Reply with a call of a tool.",
    "Reply with a call of the tool look.",
    "Call at most one tool in a reply.",
)
AS_JSON, OBJECT = 'Reply with JSON of this schema and nothing else: {"type": "object"}', {"type": "object"}
FORMAT = {"type": "json_schema", "name": "Found", "schema": OBJECT, "strict": True}
OPENAI: dict[str, Any] = {"tools": [{"type": "function", "function": TOOL}]}
FLAT: dict[str, Any] = {"tools": [{"type": "function", **TOOL}]}
CLAUDE: dict[str, Any] = {"tools": [{"name": "look", "input_schema": OBJECT}]}
BOTH = {"response_format": {"type": "json_object"}, "tool_choice": "required"}
INSTRUCTED: list[tuple[str, dict[str, Any], str, list[str]]] = [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": FORMAT}}, "response_format", [AS_JSON]),
    (
        CHAT,
        {**OPENAI, **BOTH},
        "response_format, tool_choice",
        ["If you call no tool, reply with a JSON object and nothing else.", CALL],
    ),
    (CHAT, {**OPENAI, "tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice.type", [NAMED]),
    (CHAT, {**OPENAI, "parallel_tool_calls": False}, "parallel_tool_calls", [ONE]),
    (RESPONSES, {"text": {"format": FORMAT}}, "text.format", [AS_JSON]),
    (RESPONSES, {**FLAT, "tool_choice": "required"}, "tool_choice", [CALL]),
    (RESPONSES, {**FLAT, "tool_choice": {"type": "function", "name": "look"}}, "tool_choice.type", [NAMED]),
    (MESSAGES, {"output_config": {"format": FORMAT}}, "output_config.format", [AS_JSON]),
    (MESSAGES, {**CLAUDE, "tool_choice": {"type": "any"}}, "tool_choice.type", [CALL]),
    (MESSAGES, {**CLAUDE, "tool_choice": {"type": "tool", "name": "look"}}, "tool_choice.type", [NAMED]),
]


@pytest.mark.parametrize(("path", "fields", "names", "instructions"), INSTRUCTED)
def test_field_that_no_engine_obeys_is_an_instruction_and_named(
    gateway: Gateway, path: str, fields: dict[str, Any], names: str, instructions: list[str]
) -> None:
    response = post(gateway, path, {**BODIES[path], **fields})
    assert response.status_code == 200, response.text
    assert response.headers["x-agentloop-overruled"] == names
    (request,) = gateway.session.requests
    assert request.messages[-1].content.split("\n\nInstruction: ") == ["Which stone?", *instructions]
    assert request.instructed == tuple(names.split(", "))


def test_instruction_stands_in_the_last_user_message_while_tools_are_called(gateway: Gateway) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    called = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "78"}]
    messages = [*BODIES[CHAT]["messages"], *called]
    post(gateway, CHAT, {**BODIES[CHAT], **OPENAI, "messages": messages, "tool_choice": "required"})
    (request,) = gateway.session.requests
    assert [message.content for message in request.messages] == [f"Which stone?\n\nInstruction: {CALL}", "", "78"]


def answered(said: str | Sequence[int], *, policy: Any = POLICY, **wishes: Any) -> tuple[AgentSession, AgentReply]:
    """A session after one request, whose reply the engine ended behind this text."""

    async def ask(request: AgentRequest, number: int, prompt: Prompt, most: int) -> Completion:
        ids = MODEL.codec.encode(said) if isinstance(said, str) else said
        return Completion(tuple(ids), (-0.5,) * len(ids), 0)

    request = AgentRequest("policy", "", False, (Message("user", "Where?"),), [], None, False, (), {}, **wishes)
    session = AgentSession("s", policy, ask, now=TODAY)
    return session, asyncio.run(session.reply(request, asyncio.Future(loop=asyncio.new_event_loop())))


def test_answer_names_the_stop_and_shows_log_probs_of_the_sampled_tokens() -> None:
    chat = chat_completions.read({**BODIES[CHAT], "stop": "Observation: it", "logprobs": True})
    claude = anthropic_messages.read({**BODIES[MESSAGES], "stop_sequences": ["END", "Observation: it"]})
    assert (chat.stop, claude.stop, chat.overruled) == (("Observation: it",), ("END", "Observation: it"), ())
    _, reply = answered("At sea.\nObservation: it", stop=claude.stop, log_probs=chat.log_probs)
    assert (reply.message.content, reply.finish, reply.stop) == ("At sea.\n", "stop", "Observation: it")
    answer = anthropic_messages.answer(claude, reply)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "Observation: it")
    assert b'"stop_sequence":"Observation: it"' in list(anthropic_messages.events(claude, reply))[-2]
    scored = chat_completions.answer(chat, reply)["choices"][0]["logprobs"]["content"]
    sampled = MODEL.codec.encode("At sea.\nObservation: it")
    assert [(one["token"], one["logprob"]) for one in scored] == [(MODEL.codec.decode([id]), -0.5) for id in sampled]
    assert b'"logprob":-0.5' in list(chat_completions.events(chat, reply))[-2]
    assert answered("At sea.")[1].log_probs == ()


@pytest.mark.parametrize("seed", range(20))
def test_row_has_the_tokens_that_the_engine_sampled_until_a_stop(seed: int) -> None:
    rng = random.Random(seed)
    stop = tuple("".join(rng.choices("ab \n", k=rng.randrange(1, 3))) for _ in range(2))
    said, codec = list[int](), MODEL.codec
    for token in codec.encode("".join(rng.choices(["a", "b", "c", " ", "\n", "Observation"], k=40))):
        said.append(token)
        if any(text in codec.decode(said) for text in stop):
            break
    session, reply = answered(said, stop=stop)
    (node,) = session.tree.nodes
    assert node.tokens.token_ids[-node.num_sampled :].tolist() == said
    whole = codec.decode(said)
    ends = min((whole.find(text) for text in stop if text in whole), default=len(whole))
    assert (reply.message.content, reply.finish) == (whole[:ends], "stop" if ends < len(whole) else "length")


def test_engine_that_goes_on_behind_a_stop_gives_no_reply() -> None:
    with pytest.raises(GenerationFailed, match="the engine must end a reply at its stop, got more tokens"):
        answered("At sea. END And more.", stop=("END",))


def test_instructions_are_refused_by_name_where_the_run_says_so() -> None:
    strict = replace(POLICY, unsupported="refuse")
    with pytest.raises(BadRequest, match=r"^response_format must be left out where gateway\.unsupported is refuse"):
        answered("At sea.", policy=strict, instructed=("response_format",))
    answered("At sea.", policy=strict)
