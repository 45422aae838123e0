"""The addresses below /e/EPISODE that agents and their runners ask, for any ASGI server."""

import asyncio
import gc
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from agentloop.gateway.agent_request import AgentReply, AgentRequest, BadRequest, Given
from agentloop.gateway.agent_sessions import AgentSession
from agentloop.gateway.http_json import json_bytes, json_object, openai_error, read_body
from agentloop.gateway.request_fields import ASIDE, MODEL, agent_of, flag, wrong
from agentloop.records import GenerationFailed
from context.templates.chat_template import RenderError
from replay.errors import RunReplaced

_log = logging.getLogger(__name__)
PING_SECONDS = 15.0
"""Clients and what stands between take a stream that is silent for longer, a minute say, for a broken one."""
_TURNS = 20
"""Of the event loop: until the end of a connection that has been noticed in writing or reading is received. With four,
a lost reply was taken, now and then, for one that was given."""
_ANSWERED = (BadRequest, RenderError, GenerationFailed, RunReplaced)
"""What a client may be told of a request that has no reply."""


class ProviderProtocol(Protocol):
    """A module that reads and writes as a provider does: a reply whole or as a stream, which an error may end."""

    PING: bytes

    def read(self, body: Mapping[str, Any], given: Given, /) -> AgentRequest: ...
    def answer(self, request: AgentRequest, reply: AgentReply, /) -> dict[str, Any]: ...
    def events(self, request: AgentRequest, reply: AgentReply, /) -> Iterator[bytes]: ...
    def error_event(self, bad: BadRequest, /) -> bytes: ...


# A provider's package takes up to a second and 50 MB: it is imported when its endpoint is asked. Missing, it is now.
for _package in ("openai", "anthropic"):
    if find_spec(_package) is None:
        raise ModuleNotFoundError(f"No module named {_package!r}", name=_package)


class OpenSessions(Protocol):
    """The episodes that may be asked for."""

    async def check(self, episode: str, key: str) -> None:
        """Raises as `authorize` for a wrong key, and opens nothing."""

    async def authorize(self, episode: str, key: str) -> AgentSession:
        """The session that the key opens. Raises BadRequest with status 403 for any other key or episode."""


def create_app(sessions: OpenSessions, *, ping_seconds: float = PING_SECONDS) -> Starlette:
    """The gateway. Clients of OpenAI take /e/EPISODE/v1 for their base URL, those of Anthropic /e/EPISODE."""
    routes = [
        Route("/v1/chat/completions", _Replies(sessions, "chat_completions", ping_seconds), methods=["POST"]),
        Route("/v1/responses", _Replies(sessions, "openai_responses", ping_seconds), methods=["POST"]),
        Route("/v1/messages", _Replies(sessions, "anthropic_messages", ping_seconds), methods=["POST"]),
        Route("/v1/messages/count_tokens", partial(_count_tokens, sessions), methods=["POST"]),
        Route("/v1/models", partial(_models, sessions)),
        Route("/v1/models/{model:path}", partial(_models, sessions)),
        Route("/reward", partial(_reward, sessions), methods=["POST"]),
    ]
    handlers = dict.fromkeys((*_ANSWERED, HTTPException, ClientDisconnect, Exception), _refused)
    return Starlette(routes=[Mount("/e/{episode}", routes=routes)], exception_handlers=handlers)


def _answered(error: Exception) -> BadRequest:
    if isinstance(error, BadRequest):
        return error
    if isinstance(error, RenderError):
        return BadRequest(400, str(error), "messages")
    if isinstance(error, HTTPException):
        return BadRequest(error.status_code, f"There is nothing at this address for this method: {error.detail}.")
    if isinstance(error, GenerationFailed):
        return BadRequest(503, f"The policy gave no reply: {error}")
    if isinstance(error, RunReplaced):
        return BadRequest(503, "Another gateway goes on with this recording: ask that one.")
    return BadRequest(500, "The gateway failed: its log says why. Ask again.")


async def _refused(request: Request, error: Exception) -> Response:
    bad, form = _answered(error), openai_error
    if _is_anthropics(request):
        from agentloop.gateway.anthropic_messages import error as form
    return _json(form(bad), bad.status)


def _is_anthropics(request: Request) -> bool:
    return "anthropic-version" in request.headers or "/v1/messages" in request.url.path


@dataclass(frozen=True)
class _Replies:
    """An endpoint that asks the policy."""

    sessions: OpenSessions
    module: str
    """Of its protocol, in this folder."""
    ping_seconds: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session, body = await _opened(self.sessions, Request(scope, receive))
        protocol = _protocol(self.module)
        request = protocol.read(body, session.given)
        gone = asyncio.ensure_future(receive())  # nothing but a disconnect is left to be received
        asked = asyncio.ensure_future(session.reply(request, gone))
        begun, end = False, b""
        try:
            while request.stream and not (await asyncio.wait([asked], timeout=self.ping_seconds))[0]:
                if not begun:
                    await _begin(send, request)
                begun = True
                await _more(send, protocol.PING)
            reply = await asked
            if request.stream:  # before the last part a client knows that more follows
                *parts, end = protocol.events(request, reply)
            else:
                parts = [json_bytes(protocol.answer(request, reply))]
            if not begun:
                await _begin(send, request)
            await _more(send, b"".join(parts))
            await _more(send, b"")  # returns once the client has taken most of it, or has gone
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            if not gone.done():
                session.delivered(reply)
        except Exception as error:
            if not begun:
                raise
            if not isinstance(error, _ANSWERED):
                _log.exception("a request failed")
            end = protocol.error_event(_answered(error))
        finally:
            gone.cancel()
        await send({"type": "http.response.body", "body": end})


@cache
def _protocol(module: str) -> ProviderProtocol:
    found = cast(ProviderProtocol, import_module(f"agentloop.gateway.{module}"))
    # What is there by now stays: to look for garbage in it took 90 ms, now and then, of all that wait.
    gc.collect()
    gc.freeze()
    return found


async def _begin(send: Send, request: AgentRequest) -> None:
    headers = [(b"content-type", b"text/event-stream" if request.stream else b"application/json")]
    if request.overruled:
        headers.append((b"x-agentloop-overruled", ", ".join(request.overruled).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _more(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})


async def _count_tokens(sessions: OpenSessions, request: Request) -> Response:
    from agentloop.gateway import anthropic_messages

    session, body = await _opened(sessions, request)
    tokens = await session.count_tokens(anthropic_messages.read(body))
    return _json(anthropic_messages.token_count(tokens))


async def _models(sessions: OpenSessions, request: Request) -> Response:
    """The models in the form of the provider whose client asks."""
    await sessions.check(*_asked_with(request))
    if _is_anthropics(request):
        from agentloop.gateway.anthropic_messages import model, model_list
    else:
        from agentloop.gateway.chat_completions import model, model_list
    name = request.path_params.get("model")
    if name is None:
        return _json(model_list([MODEL, ASIDE]))
    agent_of(name)
    return _json(model(name))


async def _reward(sessions: OpenSessions, request: Request) -> Response:
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
        if isinstance(reward, bool) or not isinstance(reward, (int, float)) or abs(reward) > sys.float_info.max:
            raise wrong(f"rewards.{agent}" if agent else "reward", "a number", reward)
    await session.reward({agent: float(reward) for agent, reward in rewards.items()}, end=end)
    return _json({})


async def _opened(sessions: OpenSessions, request: Request) -> tuple[AgentSession, dict[str, Any]]:
    """The session that a request asks, and its body."""
    await sessions.check(*_asked_with(request))
    body = json_object(await read_body(request))
    return await sessions.authorize(*_asked_with(request)), body


def _asked_with(request: Request) -> tuple[str, str]:
    """The episode and the key."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    key = request.headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
    if not key:
        raise BadRequest(
            401, "The key must stand in the header Authorization: Bearer KEY, or x-api-key.", code="invalid_api_key"
        )
    return request.path_params["episode"], key


def _json(value: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json_bytes(value), status, media_type="application/json")
