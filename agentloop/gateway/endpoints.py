"""The addresses below /e/EPISODE that agents and their runners ask, for any ASGI server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from agentloop.gateway.agent_request import AgentReply, AgentRequest, BadRequest, Session, Sessions
from agentloop.gateway.http_json import body_parts, json_bytes, json_object, openai_error, read_body
from agentloop.gateway.request_fields import ASIDE, MODEL, agent_of, flag, wrong
from agentloop.records import GenerationFailed
from context.templates.chat_template import RenderError

PING_SECONDS = 15.0
"""Clients and what stands between take a stream that is silent for longer, a minute say, for a broken one."""
_OVERRULED = "x-agentloop-overruled"
"""The header that names the fields of a request that did not count."""


class ProviderProtocol(Protocol):
    """A module that reads and writes as a provider does."""

    PING: bytes

    def read(self, body: Mapping[str, Any], /) -> AgentRequest: ...
    def answer(self, request: AgentRequest, reply: AgentReply, /) -> dict[str, Any]: ...
    def events(self, request: AgentRequest, reply: AgentReply, /) -> Iterator[bytes]:
        """The reply as a stream."""
        ...

    def error(self, bad: BadRequest, /) -> dict[str, Any]: ...
    def error_event(self, bad: BadRequest, /) -> bytes:
        """The end of a stream that has begun."""
        ...


# A provider's package takes up to a second and 50 MB: it is imported when its endpoint is asked.


def _chat() -> ProviderProtocol:
    from agentloop.gateway import chat_completions

    return chat_completions


def _responses() -> ProviderProtocol:
    from agentloop.gateway import openai_responses

    return openai_responses


def _messages() -> ProviderProtocol:
    from agentloop.gateway import anthropic_messages

    return anthropic_messages


def create_app(sessions: Sessions, *, ping_seconds: float = PING_SECONDS) -> Starlette:
    """The gateway. Clients of OpenAI take /e/EPISODE/v1 for their base URL, those of Anthropic /e/EPISODE."""
    replies = partial(_Replies, sessions, ping_seconds=ping_seconds)
    routes = [
        Route("/v1/chat/completions", replies(_chat), methods=["POST"]),
        Route("/v1/responses", replies(_responses), methods=["POST"]),
        Route("/v1/messages", replies(_messages), methods=["POST"]),
        Route("/v1/messages/count_tokens", partial(_count_tokens, sessions), methods=["POST"]),
        Route("/v1/models", partial(_models, sessions)),
        Route("/v1/models/{model:path}", partial(_models, sessions)),
        Route("/reward", partial(_reward, sessions), methods=["POST"]),
    ]
    handlers = dict.fromkeys((*_ANSWERED, HTTPException), _refused)
    return Starlette(routes=[Mount("/e/{episode}", routes=routes)], exception_handlers=handlers)


_ANSWERED = (BadRequest, RenderError, GenerationFailed)


def _answered(error: Exception) -> BadRequest:
    """What the client is told of a request that has no answer."""
    if isinstance(error, BadRequest):
        return error
    if isinstance(error, RenderError):
        return BadRequest(400, str(error), "messages")
    if isinstance(error, HTTPException):
        return BadRequest(error.status_code, f"There is nothing at this address for this method: {error.detail}.")
    return BadRequest(503, f"The policy gave no reply: {error}")


async def _refused(request: Request, error: Exception) -> Response:
    bad = _answered(error)
    form = _messages().error if _is_anthropics(request) else openai_error
    return Response(json_bytes(form(bad)), bad.status, media_type="application/json")


def _is_anthropics(request: Request) -> bool:
    return "anthropic-version" in request.headers or "/v1/messages" in request.url.path


class _Replies:
    """An endpoint that asks the policy."""

    def __init__(self, sessions: Sessions, load: Callable[[], ProviderProtocol], *, ping_seconds: float) -> None:
        self._sessions = sessions
        self._load = load
        self._ping_seconds = ping_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session, body = await _opened(self._sessions, Request(scope, receive))
        protocol = self._load()
        request = protocol.read(body)
        gone = asyncio.ensure_future(_hung_up(receive))
        asked = asyncio.ensure_future(session.reply(request))
        begin = partial(_begin, send, request)
        begun = False
        try:
            while request.stream and not (await asyncio.wait([asked], timeout=self._ping_seconds))[0]:
                if not begun:
                    await begin()
                begun = True
                await _more(send, protocol.PING)
            reply = await asked
            whole = _written(protocol, request, reply)
            if not begun:
                await begin(None if request.stream else len(whole))
            await _more(send, whole)
            await _more(send, b"")  # returns once the client has taken most of it
            if not gone.done():
                session.delivered(reply)
        except _ANSWERED as error:
            if not begun:
                raise
            await _more(send, protocol.error_event(_answered(error)))
        finally:
            gone.cancel()
        await send({"type": "http.response.body", "body": b""})


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _written(protocol: ProviderProtocol, request: AgentRequest, reply: AgentReply) -> bytes:
    if request.stream:
        return b"".join(protocol.events(request, reply))
    return json_bytes(protocol.answer(request, reply))


async def _begin(send: Send, request: AgentRequest, length: int | None = None) -> None:
    kind = "text/event-stream" if request.stream else "application/json"
    headers = {"content-type": kind, "cache-control": "no-store"}
    if length is not None:
        headers["content-length"] = str(length)
    if request.overruled:
        headers[_OVERRULED] = ", ".join(request.overruled)
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _more(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})


async def _count_tokens(sessions: Sessions, request: Request) -> Response:
    from agentloop.gateway import anthropic_messages

    session, body = await _opened(sessions, request)
    tokens = await session.count_tokens(anthropic_messages.read(body))
    return _json(anthropic_messages.token_count(tokens))


async def _models(sessions: Sessions, request: Request) -> Response:
    """The models in the form of the provider whose client asks."""
    await _session(sessions, request)
    if _is_anthropics(request):
        from agentloop.gateway.anthropic_messages import model, model_list
    else:
        from agentloop.gateway.chat_completions import model, model_list
    name = request.path_params.get("model")
    if name is None:
        return _json(model_list([MODEL, ASIDE]))
    agent_of(name)
    return _json(model(name))


async def _reward(sessions: Sessions, request: Request) -> Response:
    """`{"reward": number}` or `{"rewards": {agent: number}}`, and `"end": true` where the episode is over."""
    session, body = await _opened(sessions, request)
    unknown = sorted(body.keys() - {"reward", "rewards", "end"})
    if unknown:
        raise wrong(unknown[0], "left out, beside reward or rewards, and end", body[unknown[0]])
    rewards = body.get("rewards", {"": body["reward"]} if "reward" in body else {})
    end = flag("end", body.get("end"))
    if not isinstance(rewards, dict) or ("rewards" in body and "reward" in body) or not (rewards or end):
        raise wrong("rewards", "numbers by agent, or left out for a reward", body.get("rewards"))
    for agent, reward in rewards.items():
        if isinstance(reward, bool) or not isinstance(reward, (int, float)):
            raise wrong(f"rewards.{agent}" if agent else "reward", "a number", reward)
    await session.reward({agent: float(reward) for agent, reward in rewards.items()}, end=end)
    return _json({})


async def _opened(sessions: Sessions, request: Request) -> tuple[Session, dict[str, Any]]:
    """The session that a request asks, and its body."""
    try:
        session = await _session(sessions, request)
    except BadRequest:
        async for _ in body_parts(request.receive):
            pass  # a client that still sends would not see the answer
        raise
    return session, json_object(await read_body(request.receive))


async def _session(sessions: Sessions, request: Request) -> Session:
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    key = request.headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
    if not key:
        raise BadRequest(
            401, "The key must stand in the header Authorization: Bearer KEY, or x-api-key.", code="invalid_api_key"
        )
    return await sessions.authorize(request.path_params["episode"], key)


def _json(value: Mapping[str, Any]) -> Response:
    return Response(json_bytes(value), media_type="application/json")
