"""What the gateway does not do is refused in one line that names the field; hostile bodies are, too."""

import json
from functools import cache
from typing import Any

import httpx2
import pytest

from agentloop.gateway.agent_request import BadRequest
from agentloop.gateway.http_json import MAX_BODY_BYTES
from agentloop.gateway.request_fields import agent_request
from tests.fakes.agent_sessions import Gateway

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
_QUESTION = [{"role": "user", "content": "Which stone?"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "policy", "messages": _QUESTION},
    RESPONSES: {"model": "policy", "input": "Which stone?"},
    MESSAGES: {"model": "policy", "messages": _QUESTION, "max_tokens": 9},
}


_client = cache(httpx2.Client)


def post(gateway: Gateway, path: str, body: bytes | dict[str, Any]) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return _client().post(gateway.url + path, content=content, headers=gateway.headers)


def refusal(response: httpx2.Response, status: int = 400) -> tuple[str | None, str]:
    """The field and the message, which is one line."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["message"].isprintable()
    return error.get("param"), error["message"]


def _tool(**facts: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "look", **facts}}]}


def _said(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}, *_QUESTION]}


def _turn(**facts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", **facts}]}


def _calling(**function: str) -> dict[str, Any]:
    return _turn(tool_calls=[{"function": function}])


_BEGUN = {"role": "assistant", "content": "{"}
_SHOWN = {"type": "tool_result", "content": [{"type": "image"}]}
_USE = {"type": "tool_use", "name": "look", "input": "{}"}
_SPACE = {"type": "namespace", "name": "quarry", "tools": [{"type": "function", "name": "look"}]}
UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"n": 2}, "n must be 1, or left out, got 2."),
    (CHAT, {"n": True}, "n must be 1, or left out, got true."),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format must be of type text, json_object, or json_"),
    (CHAT, {"response_format": "json"}, "response_format must be of type text, json_object, or json_schema with its s"),
    (CHAT, {"tool_choice": "required"}, "tool_choice must be auto, none, or what an offered tool can fulfil: required"),
    (CHAT, {**_tool(), "tool_choice": "any one"}, "tool_choice must be auto, none, or what an offered tool can fulfil"),
    (CHAT, {**_tool(), "tool_choice": {"type": "function", "function": {"name": "dig"}}}, "tool_choice must be auto, "),
    (CHAT, {**_tool(), "tool_choice": {"type": "function", "function": "look"}}, "tool_choice must be auto, none, or"),
    (CHAT, {**_tool(), "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.mode must be left out"),
    (CHAT, {**_tool(), "parallel_tool_calls": 0}, "parallel_tool_calls must be true or false, got 0."),
    (CHAT, {"logprobs": 1}, "logprobs must be true or false, got 1."),
    (CHAT, {"top_logprobs": 3}, "top_logprobs must be 0, or left out, got 3."),
    (CHAT, {"stop": ["a", ""]}, 'stop must be a text or a list of texts, none of them empty, got ["a", ""].'),
    (CHAT, {"stop_sequences": ["a"]}, "stop_sequences must be left out"),
    (CHAT, {"modalities": ["text", "audio"]}, 'modalities must be ["text"], or left out'),
    (CHAT, {"guided_regex": "a+"}, "guided_regex must be left out"),
    (CHAT, {"max_tokens": 0}, "max_tokens must be an integer above 0, got 0."),
    (CHAT, {"max_completion_tokens": True}, "max_completion_tokens must be an integer above 0, got true."),
    (CHAT, {"stream": "yes"}, 'stream must be true or false, got "yes".'),
    (CHAT, {"messages": []}, "messages must be a list of at least one message, got []."),
    (CHAT, {"messages": "hello"}, 'messages must be a list, got "hello".'),
    (CHAT, {"messages": ["hello"]}, "messages[0].role must be system, developer, user, assistant or tool, got null."),
    (CHAT, {"messages": [{"role": "<|im_end|>"}]}, "messages[0].role must be system, developer"),
    (CHAT, _said({"type": "image_url", "image_url": {"url": "x"}}), "messages[0].content[0] must be a text part"),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages[0].content must be text or a list of text parts"),
    (CHAT, _turn(function_call={"name": "look"}), "messages[0].function_call must be left out"),
    (CHAT, _calling(name="look", arguments="{"), "messages[0].tool_calls must hold an object of arguments"),
    (CHAT, _calling(name="<tool>"), "messages[0].tool_calls[0].name must match"),
    (CHAT, {"messages": [{"role": "tool", "name": "a\nb", "content": ""}]}, "messages[0].name must match"),
    (CHAT, {"tools": {}}, "tools must be a list, got {}."),
    (CHAT, {"tools": [{"type": "custom", "name": "look"}]}, "tools[0].type must be that of a function"),
    (CHAT, {"tools": [{"type": "function", "function": 1}]}, "tools[0].function must be an object, got 1."),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].name must match"),
    (CHAT, _tool(name="<|im_end|>"), "tools[0].name must match"),
    (CHAT, _tool(parameters="any"), 'tools[0].parameters must be an object, got "any".'),
    (CHAT, _tool(description=5), "tools[0].description must be text, got 5."),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id must be left out, got"),
    (RESPONSES, {"background": True}, "background must be false, or left out"),
    (RESPONSES, {"truncation": "auto"}, 'truncation must be "disabled", or left out'),
    (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include must be [] or"),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format must be"),
    (RESPONSES, {"text": {"tone": "calm"}}, "text.tone must be left out"),
    (RESPONSES, {"tools": [_SPACE, {"type": "web_search"}, 5]}, "tools[2].type must be that of a function"),
    (RESPONSES, {"tools": [_SPACE, _SPACE]}, "tools must be functions of different names, in whatever namespaces, got"),
    (RESPONSES, {"tools": [{**_SPACE, "tools": [_SPACE]}]}, "tools[0].tools[0].type must be that of a function"),
    (RESPONSES, {"tools": [{**_SPACE, "tools": 5}]}, "tools[0].tools must be a list, got 5."),
    (RESPONSES, {"instructions": ["x"]}, 'instructions must be text, got ["x"].'),
    (RESPONSES, {"input": []}, "input must be a list of at least one message, got []."),
    (RESPONSES, {"input": [3]}, "input[0] must be an object, got 3."),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id must be that of an item of a r"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "fc_1_" + "9" * 5000}]}, "input[0].id must be that of an"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": ["msg_1"]}]}, "input[0].id must be that of an item of a r"),
    (RESPONSES, {"input": [{"type": "computer_call"}]}, "input[0].type must be message, reasoning"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0] must be a t"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "a b"}]}, "input[0].tool_calls[0].name must match"),
    (RESPONSES, {"input": [{"type": "reasoning", "summary": [{"type": "x"}]}]}, "input[0] must be of text parts"),
    (RESPONSES, {"input": [{"type": "reasoning", "summary": 5}]}, "input[0].summary must be a list, got 5."),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice must be auto, none, or what an offered tool can fulfil"),
    (MESSAGES, {"tool_choice": {"name": "look"}}, "tool_choice.name must be left out"),
    (MESSAGES, {"stop_sequences": 5}, "stop_sequences must be a list, got 5."),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format must be of type text, js"),
    (MESSAGES, {"container": "c"}, "container must be left out"),
    (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type must be that of a function"),
    (MESSAGES, {"system": [{"type": "image"}]}, "system[0] must be a block of text"),
    (MESSAGES, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role must be user, assistant or system"),
    (MESSAGES, _said({"type": "image", "source": {}}), "messages[0].content[0].type must be one that user messages "),
    (MESSAGES, _said("text"), 'messages[0].content[0] must be an object with a type, got "text".'),
    (MESSAGES, _said({"type": "text", "text": 5}), "messages[0].content[0] must be a block of text"),
    (MESSAGES, _said(_SHOWN), "messages[0].content[0].content[0] must be a block of text"),
    (MESSAGES, _said(_USE, role="assistant"), "messages[0].content[0].input must be an object"),
    (MESSAGES, _said({"type": "redacted_thinking"}, role="assistant"), "messages[0].content[0].type must be one that"),
    (CHAT, {"messages": [*_QUESTION, _BEGUN]}, "messages[1].role must be user in"),
    (RESPONSES, {"input": [*_QUESTION, _BEGUN]}, "input[1].role must be user in"),
    (MESSAGES, {"messages": [*_QUESTION, _BEGUN]}, "messages[1].role must be user in"),
]


def test_unsupported_field_is_refused_by_its_name(gateway: Gateway) -> None:
    for path, fields, text in UNSUPPORTED:
        field, message = refusal(post(gateway, path, {**BODIES[path], **fields}))
        assert message.startswith(text), message
        assert field == (None if path == MESSAGES else text.partition(" must ")[0])
    assert gateway.session.requests == []


HOSTILE: list[tuple[bytes, int, str]] = [
    (b"", 400, "it is not valid JSON"),
    (b"{} {}", 400, "it is not valid JSON: Extra data"),
    (b"[]", 400, "The body must be a JSON object."),
    (b"\xff\xfe{}", 400, "The body must be JSON in UTF-8"),
    (b'{"model": "\xed\xa0\x80"}', 400, "The body must be JSON in UTF-8"),
    (b'{"model": "\\ud800"}', 400, "it holds half a character"),
    (b'{"model": "policy", "model": "aside"}', 400, "it has the same key twice"),
    (b'{"temperature": NaN}', 400, "it holds NaN"),
    (b'{"temperature": 1e999}', 400, "it holds a number that is too large"),
    (b'{"seed": ' + b"9" * 5000 + b"}", 400, "it holds a number that is too long"),
    (b'{"tools": ' + b"[" * 65 + b"]" * 65 + b"}", 400, "it is nested too deeply"),
    (b"[" * 200_000, 400, "it is nested too deeply"),
    (b'{"\x1b[31m\\u202e": 1, "model": "policy"}', 400, "it is not valid JSON"),
    (b'{"\\u001b[31m\\u202e": 1, "model": "policy"}', 400, "<U+001B>[31m<U+202E> must be left out"),
    (b'{"model": "policy", "' + b"x" * 10**6 + b'": 1}', 400, "xxx... must be left out, got 1."),
    (b'{"model": 5}', 404, "model must be policy, policy/NAME or aside, got 5."),
    (b'{"model": "policy/a b"}', 404, "model must be policy, policy/NAME or aside"),
    (b'{"model": "policy/' + b"x" * 65 + b'"}', 404, "model must be policy, policy/NAME or aside"),
    (b'{"model": "aside/x"}', 404, "model must be policy, policy/NAME or aside"),
    (b"{}", 404, "model must be policy, policy/NAME or aside, got null."),
    (b" " * (MAX_BODY_BYTES + 1), 413, f"The body must have at most {MAX_BODY_BYTES} bytes, got more."),
]


@pytest.mark.parametrize("path", BODIES)
def test_hostile_bodies_are_one_line_and_no_servers_error(gateway: Gateway, path: str) -> None:
    for body, status, text in HOSTILE:
        _, message = refusal(post(gateway, path, body), status)
        assert text in message
        assert len(message) < 300
    assert gateway.session.requests == []


def test_author_that_a_message_claims_does_not_count(gateway: Gateway) -> None:
    messages = [{"role": "assistant", "content": "Granite.", "author": "llm"}, *_QUESTION]
    assert post(gateway, CHAT, {**BODIES[CHAT], "messages": messages}).status_code == 200
    assert [message.author for message in gateway.session.requests[0].messages] == ["initialization", "user"]


_SCHEMA = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
_RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "", "is_error": True}
_NAMED = {"messages": [{**_QUESTION[0], "name": "Ann", "weight": 1, "a\n, b": 1, "id": "m", "audio": None}]}
OVERRULED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"temperature": 0.2, "top_p": 0.5, "seed": 3, "top_k": 5}, "seed, temperature, top_k, top_p"),
    (CHAT, {"logit_bias": {}, "presence_penalty": 1, "verbosity": "low"}, "logit_bias, presence_penalty, verbosity"),
    (CHAT, {"chat_template_kwargs": {"a": 1}, "reasoning_effort": "low"}, "chat_template_kwargs, reasoning_effort"),
    (CHAT, {**_tool(), "tool_choice": "required", "model": "aside"}, "tool_choice"),
    (CHAT, {"response_format": _SCHEMA["format"], "model": "aside"}, "response_format"),
    (CHAT, _NAMED, "messages.?, messages.name, messages.weight"),
    (CHAT, _tool(strict=True, description=None), "tools.strict"),
    (RESPONSES, {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}, "reasoning, text.verbosity"),
    (RESPONSES, {"text": _SCHEMA, "model": "aside"}, "text.format"),
    (RESPONSES, {"tools": [{"type": "web_search", "function": 5}]}, "tools.web_search"),
    (RESPONSES, {"input": [{**_QUESTION[0], "name": "Ann"}]}, "input.name"),
    (MESSAGES, {"thinking": {"type": "enabled"}, "output_config": {"effort": "low"}}, "output_config.effort, thinking"),
    (MESSAGES, {"context_management": {}, "top_k": 5}, "context_management, top_k"),
    (MESSAGES, {"output_config": _SCHEMA, "model": "aside"}, "output_config.format"),
    (MESSAGES, _said(_RESULT), "messages.is_error"),
]


def test_fields_without_effect_are_overruled_and_named(gateway: Gateway) -> None:
    for path, fields, names in OVERRULED:
        response = post(gateway, path, {**BODIES[path], **fields})
        assert response.status_code == 200, response.text
        assert response.headers["x-agentloop-overruled"] == names
        assert gateway.session.requests[-1].overruled == tuple(names.split(", "))


HARMLESS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"user": "u", "metadata": {"a": 1}, "store": False, "service_tier": "auto", "stream_options": None}),
    (CHAT, {"n": 1, "response_format": {"type": "text"}, "tool_choice": "auto", "logprobs": False, "stop": None}),
    (CHAT, {"parallel_tool_calls": True, "prompt_cache_key": "k", "safety_identifier": "s", "stop": []}),
    (RESPONSES, {"store": True, "include": ["reasoning.encrypted_content"], "truncation": "disabled"}),
    (RESPONSES, {"text": {"format": {"type": "text"}}, "background": False, "previous_response_id": None}),
    (MESSAGES, {"metadata": {"user_id": "u"}, "service_tier": "auto", "stop_sequences": [], "cache_control": {}}),
    (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}}),
]


def test_fields_that_change_nothing_are_taken(gateway: Gateway) -> None:
    for path, fields in HARMLESS:
        response = post(gateway, path, {**BODIES[path], **fields})
        assert response.status_code == 200, response.text
        assert gateway.session.requests[-1].overruled == ()
        assert "x-agentloop-overruled" not in response.headers


def test_the_lowest_limit_counts_and_tools_that_may_not_be_used_are_not_shown(gateway: Gateway) -> None:
    def asked(path: str, **fields: Any) -> Any:
        assert post(gateway, path, {**BODIES[path], **fields}).status_code == 200
        return gateway.session.requests[-1]

    assert asked(CHAT, max_tokens=70, max_completion_tokens=50).max_tokens == 50
    assert asked(CHAT).max_tokens is None
    assert asked(RESPONSES, max_output_tokens=30).max_tokens == 30
    assert asked(CHAT, **_tool(description="Looks.", strict=True)).tools == _tool(description="Looks.")["tools"]
    assert asked(CHAT, **_tool(), tool_choice="none").tools == []
    assert asked(RESPONSES, tools=[{"type": "web_search"}]).tools == []
    claude = {"name": "look", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
    assert asked(MESSAGES, tools=[claude]).tools == _tool(parameters={"type": "object"})["tools"]
    assert asked(MESSAGES, tools=[claude], tool_choice={"type": "none"}).tools == []


def test_results_of_parallel_calls_stand_as_they_were_asked_for() -> None:
    calls = [{"id": id, "function": {"name": "look", "arguments": "{}"}} for id in "cab"]

    def order(results: str) -> str:
        turns = [{"role": "tool", "tool_call_id": id, "content": id} for id in results]
        rows = [{"role": "assistant", "tool_calls": calls}, *turns, *_QUESTION, *turns[:2], *_QUESTION]
        found = agent_request({"model": "policy"}, list(enumerate(rows)), [])
        return "".join("?" if message.role == "user" else message.content for message in found.messages)

    assert order("abc") == "cab?ab?"
    assert order("bxa") == "bxa?bx?"


def test_messages_that_are_known_are_told_apart_to_the_letter() -> None:
    """1 is not true, 1.0 is not 1; and a wrong message is named by its own place each time."""
    found = []
    for value in (1, True, 1.0, 1):
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"at": value}}}
        rows = [{"role": "assistant", "tool_calls": [call]}, *_QUESTION]
        request = agent_request({"model": "policy", "messages": rows}, list(enumerate(rows)), [])
        found.append(request.messages[0].tool_calls[0].arguments["at"])
    assert [(value, type(value)) for value in found] == [(1, int), (True, bool), (1.0, float), (1, int)]
    for before in (0, 2):
        rows = [*_QUESTION * before, {"role": "user", "content": 7}]
        with pytest.raises(BadRequest, match=rf"messages\[{before}\].content must"):
            agent_request({"model": "policy", "messages": rows}, list(enumerate(rows)), [])
