"""What the providers' own clients, with their strictest checks, make of the gateway's answers."""

from collections.abc import Callable
from functools import cache
from typing import Any

import anthropic
import openai
import pytest

from agentloop.gateway.agent_request import BadRequest, NoRoom
from agentloop.records import GenerationFailed
from context import Message, RenderError, ToolCall
from tests.fakes.agent_sessions import CALL, Gateway, plain, said, scripted_gateway

MODEL = "policy/digger"
TOOL = {
    "name": "look",
    "description": "Looks for stones.",
    "parameters": {"type": "object", "properties": {"depth": {"type": "integer"}}},
}
QUESTION = {"role": "user", "content": "Which stone?"}
_AWKWARD = 'In "quotes",\r\n\tlines\u2028\u2029\x85\x0b\x1c and 石 \U0001faa8 </think> data: [DONE]\n\n'
_NESTED = {"b": [1, 2.5, None, True, {"": _AWKWARD}], "a": {"z": 10**30, "y": -0.0}}
REPLIES = {
    "text": said("A stone."),
    "nothing": said(""),
    "white space": said(" \n\n"),
    "awkward text": said(_AWKWARD),
    "a call": said("", CALL),
    "parallel calls": said("I look.", CALL, ToolCall("look", {}, "call_1_1"), ToolCall("dig", _NESTED, "call_1_2")),
    "thinking": said("A stone.", reasoning=_AWKWARD),
    "thinking and a call": said("", CALL, reasoning="Where?"),
}


def openai_client(gateway: Gateway, key: str | None = None) -> openai.OpenAI:
    return _openai(f"{gateway.url}/v1", key or gateway.sessions.key())


def anthropic_client(gateway: Gateway, key: str | None = None) -> anthropic.Anthropic:
    return _anthropic(gateway.url, key or gateway.sessions.key())


@cache
def _openai(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, _strict_response_validation=True)


@cache
def _anthropic(url: str, key: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, _strict_response_validation=True)


def _dumped(value: Any) -> dict[str, Any]:
    return value.model_dump(mode="json", exclude_none=True)


def _chat(gateway: Gateway, said_before: list[Any], *, stream: bool = False) -> tuple[Any, list[Any]]:
    completions = openai_client(gateway).chat.completions
    asked = {"model": MODEL, "messages": [QUESTION, *said_before], "tools": [{"type": "function", "function": TOOL}]}
    if stream:
        with completions.stream(**asked, stream_options={"include_usage": True}) as events:
            try:
                done = events.get_final_completion()
            except openai.LengthFinishReasonError as cut:
                done = cut.completion
    else:
        done = completions.create(**asked)
    message = _dumped(done.choices[0].message)
    for call in message.get("tool_calls", []):
        call.pop("index", None)  # streams number their calls
    return (done.choices[0].finish_reason, _dumped(done.usage)), [message]


def _responses(gateway: Gateway, said_before: list[Any], *, stream: bool = False) -> tuple[Any, list[Any]]:
    responses = openai_client(gateway).responses
    asked = {"model": MODEL, "input": [QUESTION, *said_before], "tools": [{"type": "function", "strict": True, **TOOL}]}
    if stream:
        with responses.stream(**asked) as events:
            seen = list(events)
        done = seen[-1].response
    else:
        done = responses.create(**asked)
    items = [_dumped(item) for item in done.output]
    for item in items:
        item.pop("parsed_arguments", None)
    return (done.status, _dumped(done.usage)), items


def _messages(gateway: Gateway, said_before: list[Any], *, stream: bool = False) -> tuple[Any, list[Any]]:
    messages = anthropic_client(gateway).messages
    tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
    asked = {"model": MODEL, "messages": [QUESTION, *said_before], "tools": [tool], "max_tokens": 100}
    if stream:
        with messages.stream(**asked) as events:
            done = events.get_final_message()
    else:
        done = messages.create(**asked)
    return (done.stop_reason, _dumped(done.usage)), [{"role": done.role, "content": [_dumped(b) for b in done.content]}]


Ask = Callable[..., tuple[Any, list[Any]]]
ASKS: dict[str, Ask] = {"chat": _chat, "responses": _responses, "messages": _messages}
FINISHES = {
    "chat": ("stop", "tool_calls", "length"),
    "responses": ("completed", "completed", "incomplete"),
    "messages": ("end_turn", "tool_use", "max_tokens"),
}


@pytest.fixture(params=ASKS)
def protocol(request: pytest.FixtureRequest) -> str:
    return request.param


def test_replies_come_streamed_and_whole_alike_and_are_read_back_as_said(gateway: Gateway, protocol: str) -> None:
    ask = ASKS[protocol]
    for message in REPLIES.values():
        gateway.session.says = message
        whole = ask(gateway, [])
        gateway.session.requests.pop()  # the next reply has its number, too
        assert ask(gateway, [], stream=True) == whole
        assert whole[0][0] == FINISHES[protocol][bool(message.tool_calls)]
        ask(gateway, [*whole[1], QUESTION])
        request = gateway.session.requests[-1]
        assert plain(request.messages[1]) == plain(message)
        assert request.messages[0] == Message("user", "Which stone?")
        assert request.tools == [{"type": "function", "function": TOOL}]
        overruled = ("tools.strict",) if protocol == "responses" else ()
        assert (request.agent, request.aside, request.overruled) == ("digger", False, overruled)


def test_calls_of_namespaces_name_them(gateway: Gateway) -> None:
    gateway.session.says = said("", CALL, ToolCall("dig", {}, "call_1_1"))
    space = {"type": "namespace", "name": "quarry", "description": "", "tools": [{"type": "function", **TOOL}]}
    responses, tools = openai_client(gateway).responses, [space, {"type": "function", "name": "dig", "strict": False}]
    done = responses.create(model=MODEL, input=[QUESTION], tools=tools)
    with responses.stream(model=MODEL, input=[QUESTION], tools=tools) as events:
        added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [[item.namespace for item in items] for items in (done.output, added)] == [["quarry", None]] * 2
    responses.create(model=MODEL, input=[QUESTION, *map(_dumped, done.output), QUESTION], tools=tools)
    request = gateway.session.requests[-1]
    assert plain(request.messages[1]) == plain(gateway.session.says)
    assert [tool["function"]["name"] for tool in request.tools] == ["look", "dig"]


def test_reply_that_reached_its_limit_says_so_streamed_and_whole(gateway: Gateway, protocol: str) -> None:
    gateway.session.cut = True
    for stream in (False, True):
        facts, content = ASKS[protocol](gateway, [], stream=stream)
        assert facts[0] == FINISHES[protocol][2]
        assert "A stone." in str(content)


def test_usage_counts_the_tokens_of_prompt_and_reply(gateway: Gateway) -> None:
    (_, chat), _ = _chat(gateway, [])
    cached = {"prompt_tokens_details": {"cached_tokens": 4}}
    assert chat == {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18, **cached}
    (_, responses), _ = _responses(gateway, [])
    assert (responses["input_tokens"], responses["output_tokens"], responses["total_tokens"]) == (11, 7, 18)
    (_, messages), _ = _messages(gateway, [])
    assert (messages["input_tokens"], messages["cache_read_input_tokens"], messages["output_tokens"]) == (7, 4, 7)


def test_results_of_parallel_calls_and_a_text_behind_them_are_messages_of_their_own(gateway: Gateway) -> None:
    gateway.session.says = said("I look.", CALL, ToolCall("look", {}, "call_1_1"))
    results = [("call_1_0", "granite"), ("call_1_1", "basalt")]
    expected = [Message("tool", text, "env", tool_call_id=call) for call, text in results]
    expected.append(Message("user", "And now?"))
    text = {"role": "user", "content": "And now?"}
    _, chat = _chat(gateway, [])
    _chat(gateway, [*chat, *({"role": "tool", "tool_call_id": call, "content": said} for call, said in results), text])
    assert list(gateway.session.requests[-1].messages[2:]) == expected
    _, items = _responses(gateway, [])
    outputs = [{"type": "function_call_output", "call_id": call, "output": said} for call, said in results]
    _responses(gateway, [*items, *outputs, text])
    assert list(gateway.session.requests[-1].messages[2:]) == expected
    _, turn = _messages(gateway, [])
    ephemeral = {"type": "ephemeral"}
    blocks: list[Any] = [
        {"type": "tool_result", "tool_use_id": "call_1_0", "content": "granite", "cache_control": ephemeral},
        {"type": "tool_result", "tool_use_id": "call_1_1", "content": [{"type": "text", "text": "basalt"}]},
        {"type": "text", "text": "And "},
        {"type": "text", "text": "now?"},
    ]
    messages = [QUESTION, *turn, {"role": "user", "content": blocks}]
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief.", "cache_control": ephemeral}]
    anthropic_client(gateway).messages.create(model=MODEL, messages=messages, system=system, max_tokens=9)
    read = gateway.session.requests[-1]
    assert list(read.messages[3:]) == expected
    assert (read.messages[0], read.max_tokens) == (Message("system", "Be brief.", "initialization"), 9)


def test_items_of_several_replies_in_a_row_stay_several_messages(gateway: Gateway) -> None:
    def call(name: str) -> dict[str, str]:
        return {"type": "function_call", "call_id": name, "name": "look", "arguments": "{}"}

    items = [
        QUESTION,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Where?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Here."}]},
        *(call("1"), call("2")),
        {"role": "assistant", "content": "There."},
        {"role": "assistant", "content": "Nowhere."},
        {"role": "developer", "content": [{"type": "input_text", "text": "Stop."}]},
    ]
    openai_client(gateway).responses.create(model=MODEL, input=items, instructions="Be brief.")
    messages = gateway.session.requests[-1].messages
    assert [(message.role, message.content, len(message.tool_calls)) for message in messages] == [
        ("system", "Be brief.", 0),
        ("user", "Which stone?", 0),
        ("assistant", "Here.", 2),
        ("assistant", "There.", 0),
        ("assistant", "Nowhere.", 0),
        ("system", "Stop.", 0),
    ]
    assert messages[2].reasoning == "Where?"


def test_models_and_counted_tokens_are_read_by_both_clients(gateway: Gateway) -> None:
    first, second = openai_client(gateway), anthropic_client(gateway)
    assert [model.id for model in first.models.list()] == ["policy", "aside"]
    assert [model.id for model in second.models.list()] == ["policy", "aside"]
    assert first.models.retrieve(MODEL).id == second.models.retrieve(MODEL).id == MODEL
    counted = second.messages.count_tokens(model=MODEL, messages=[QUESTION], system="Be brief.")
    assert counted.input_tokens == 23
    assert [message.content for message in gateway.session.requests[-1].messages] == ["Be brief.", "Which stone?"]
    for client, error in ((first, openai.NotFoundError), (second, anthropic.NotFoundError)):
        with pytest.raises(error, match="model must be policy, policy/NAME or aside"):
            client.models.retrieve("gpt-4o")


FAILURES = [
    (BadRequest(400, "stop must be left out.", "stop"), "BadRequestError", "stop must be left out."),
    (RenderError("messages must begin with a user's."), "BadRequestError", "messages must begin with a user's."),
    (GenerationFailed("deadline"), "InternalServerError", "The policy gave no reply: deadline"),
]


def test_failures_raise_the_typed_exceptions_of_each_client(gateway: Gateway, protocol: str) -> None:
    package: Any = anthropic if protocol == "messages" else openai
    for failure, name, text in FAILURES:
        gateway.session.says = failure
        for stream in (False, True):
            with pytest.raises(getattr(package, name)) as raised:
                ASKS[protocol](gateway, [], stream=stream)
            assert text in str(raised.value)
            assert "retry-after" not in raised.value.response.headers


def test_prompt_without_room_is_refused_in_the_words_that_agents_look_for(gateway: Gateway) -> None:
    gateway.session.says = NoRoom(5000, 4096)
    for ask in (_chat, _responses):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens") as raised:
            ask(gateway, [])
        assert raised.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 5000 tokens > 4096 maximum"):
        _messages(gateway, [])


def test_failure_of_a_stream_that_has_begun_is_raised_with_its_reason(protocol: str) -> None:
    package: Any = anthropic if protocol == "messages" else openai
    with scripted_gateway(ping_seconds=0.01) as gateway:
        gateway.session.says = GenerationFailed("deadline")
        gateway.session.free.clear()
        messages = [QUESTION]
        with pytest.raises(package.APIError, match="The policy gave no reply: deadline"):
            if protocol == "messages":
                stream: Any = anthropic_client(gateway).messages.create(
                    model=MODEL, messages=messages, max_tokens=5, stream=True
                )
            elif protocol == "responses":
                stream = openai_client(gateway).responses.create(model=MODEL, input="Which stone?", stream=True)
            else:
                stream = openai_client(gateway).chat.completions.create(model=MODEL, messages=messages, stream=True)
            gateway.session.free.set()  # the answer has begun, with a ping
            list(stream)
        assert gateway.session.log == ["asked 1"]


def test_key_of_nobody_or_of_another_episode_raises_what_clients_know(gateway: Gateway) -> None:
    sessions = gateway.sessions
    for key in ("no key", sessions.key("quarry-2")):
        with pytest.raises(openai.PermissionDeniedError, match="The key must be this episode's"):
            openai_client(gateway, key).models.list()
        with pytest.raises(anthropic.PermissionDeniedError, match="The key must be this episode's"):
            anthropic_client(gateway, key).messages.create(model=MODEL, messages=[QUESTION], max_tokens=5)
    with pytest.raises(openai.AuthenticationError, match="The key must stand in the header"):
        openai_client(gateway).models.list(extra_headers={"Authorization": "Basic no"})
    anthropic.Anthropic(base_url=gateway.url, auth_token=sessions.key()).models.list()
    assert gateway.session.requests == []
