"""Replies of another model are stored where they are its own, whole, and what they are read as again."""

import asyncio
from typing import Any

import pytest

from agentloop.gateway import anthropic_messages
from agentloop.gateway.agent_request import AgentRequest, BadRequest
from agentloop.gateway.text_upstream import TextUpstream
from agentloop.records import Completion, GenerationFailed
from context import Message
from context.conversation_tree import ConversationTree
from context.parse import PARSERS
from tests.fakes.families import family
from tests.fakes.random_agents import TODAY, TOOLS
from tests.fakes.scripted_http import scripted_server

MODEL, MOST = family("chatml"), 400
TREE = ConversationTree(MODEL.renderer(), PARSERS["hermes"], now=TODAY)
_LOOKUP = {"name": "lookup", "arguments": '{"key": "pearl", "depth": 3}'}
CALL = {"id": "call_up", "type": "function", "function": _LOOKUP}


def answered(finish: str | None, **message: Any) -> Completion:
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": None, **message}}
    return read(200, {"id": "x", "created": 1, "model": "large", "choices": [choice]})


def read(status: int, answer: Any) -> Completion:
    request = AgentRequest("policy", "", False, (Message("user", "Where?"),), TOOLS, None, False, (), {})
    with scripted_server() as server:
        server.answers["/v1/chat/completions"] = (status, answer)
        upstream = TextUpstream(f"{server.url}/v1", key=None, model="large", renderer=MODEL.renderer())
        return asyncio.run(upstream.ask(request, 0, TREE.prompt(request.messages, TOOLS), MOST))


@pytest.mark.parametrize(
    ("finish", "message", "text"),
    [
        ("stop", {"refusal": "I can't help with that."}, "I can't help with that."),
        ("content_filter", {"content": "It is"}, "finish_reason 'content_filter'"),
        (None, {"content": "It is"}, "finish_reason None"),
        *(("stop", {"content": empty}, "an empty one") for empty in ("", " \n", None)),
        ("length", {"content": ""}, "an empty one"),
        ("length", {"tool_calls": [CALL]}, "calls that a limit on tokens has cut off"),
        ("tool_calls", {"tool_calls": [CALL] * 40}, "calls that a limit on tokens has cut off"),
        ("stop", {"content": f"One says {MODEL.call} for this."}, "chat template must show all of a learned reply"),
        ("stop", {"content": "One begins with <tool_call> here."}, "chat template must write a learned reply"),
    ],
)
def test_reply_that_can_not_be_imitated_exactly_is_refused(
    finish: str | None, message: dict[str, Any], text: str
) -> None:
    with pytest.raises(GenerationFailed, match=f"^the upstream must give .* got RenderError: {text}"):
        answered(finish, **message)


@pytest.mark.parametrize("answer", [[1], {"choices": [None]}, {"choices": [{"message": None}]}, {"choices": None}])
def test_answer_that_is_no_chat_completion_is_refused(answer: Any) -> None:
    with pytest.raises(GenerationFailed, match="^the upstream must give "):
        read(200, answer)


def test_upstream_without_room_for_a_reply_is_what_agents_shorten_their_conversations_for() -> None:
    with pytest.raises(BadRequest, match="too long") as refusal:
        read(400, {"error": {"message": "It is too long.", "code": "context_length_exceeded"}})
    assert (refusal.value.status, refusal.value.code) == (400, "context_length_exceeded")
    assert anthropic_messages.error(refusal.value)["error"]["message"].startswith("prompt is too long: ")


def test_a_reply_longer_than_was_asked_for_is_cut_as_the_policys_own() -> None:
    ids = answered("stop", content="It is " + "78 " * MOST).token_ids
    assert (len(ids), MODEL.end_id in ids) == (MOST, False)


@pytest.mark.parametrize(
    ("finish", "message"),
    [
        ("stop", {"content": " It is 78.\n"}),
        ("stop", {"content": "<think>\nhm\n</think>\n\nIt is 78."}),
        ("tool_calls", {"content": "I look.", "tool_calls": [CALL, CALL]}),
        ("length", {"content": "One begins with"}),
    ],
)
def test_reply_has_the_policys_tokens(finish: str, message: dict[str, Any]) -> None:
    ids = answered(finish, **message).token_ids
    assert (ids[-1] == MODEL.end_id) == (finish != "length")
    said = MODEL.codec.decode(ids)
    assert (message["content"].strip() in said, said.count("pearl")) == (True, 2 * (finish == "tool_calls"))
