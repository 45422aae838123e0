"""The gateway's HTTP endpoints below /e/EPISODE, as an application for any ASGI server."""

import asyncio
import gc
import hmac
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

from agentloop.gateway.agent_request import AgentReply, AgentRequest, BadRequest, FindReply
from agentloop.gateway.agent_sessions import AgentSession
from agentloop.gateway.http_json import json_bytes, json_object, openai_error, read_body
from agentloop.gateway.request_fields import ASIDE, MODEL, flag, read_agent, wrong
from agentloop.records import GenerationFailed
from context.templates.chat_template import RenderError
from replay.errors import RunReplaced

_log = logging.getLogger(__name__)
PING_SECONDS = 15.0
"""Seconds between pings. Clients and proxies take a stream that is silent for long, such as a minute, for broken."""
_LOOP_TURNS = 20
"""Turns of the event loop that a disconnect may take until it is received. With four turns, a lost reply sometimes
counted as delivered."""
_SHOWN_ERRORS = (BadRequest, RenderError, GenerationFailed, RunReplaced)
"""Errors that a client is shown. Any other error goes to the log, and the client is told that the gateway failed."""


class ProviderProtocol(Protocol):
    """A module of a provider's protocol: it reads requests, and writes replies whole or as a stream."""

    PING: bytes

    def read(self, body: Mapping[str, Any], find_reply: FindReply, /) -> AgentRequest: ...
    def answer(self, request: AgentRequest, reply: AgentReply, /) -> dict[str, Any]: ...
    def events(self, request: AgentRequest, reply: AgentReply, /) -> Iterator[bytes]: ...
    def error_event(self, bad: BadRequest, /) -> bytes: ...


# A provider's package takes up to a second and 50 MB: its endpoint imports it when asked. A missing one fails now.
for _package in ("openai", "anthropic"):
    if find_spec(_package) is None:
        raise ModuleNotFoundError(f"No module named {_package!r}", name=_package)


class OpenSessions(Protocol):
    """The sessions that the gateway answers."""

    async def check(self, episode: str, key: str) -> None:
        """Check the key without opening a session. Raises BadRequest as `authorize` does."""

    async def authorize(self, episode: str, key: str) -> AgentSession:
        """Return the session that the key opens. Raises BadRequest with status 403 for another key or episode."""


def create_app(sessions: OpenSessions, *, ping_seconds: float = PING_SECONDS) -> Starlette:
    """Create the gateway. The base URL is /e/EPISODE/v1 for OpenAI's clients, and /e/EPISODE for Anthropic's."""
    routes = [
        Route("/v1/chat/completions", _Replies(sessions, "chat_completions", ping_seconds), methods=["POST"]),
        Route("/v1/responses", _Replies(sessions, "openai_responses", ping_seconds), methods=["POST"]),
        Route("/v1/messages", _Replies(sessions, "anthropic_messages", ping_seconds), methods=["POST"]),
        Route("/v1/messages/count_tokens", partial(_count_tokens, sessions), methods=["POST"]),
        Route("/v1/models", partial(_models, sessions)),
        Route("/v1/models/{model:path}", partial(_models, sessions)),
        Route("/reward", partial(_reward, sessions), methods=["POST"]),
    ]
    handlers = dict.fromkeys((*_SHOWN_ERRORS, HTTPException, ClientDisconnect, Exception), _answer_error)
    return Starlette(routes=[Mount("/e/{episode}", routes=routes)], exception_handlers=handlers)


def _as_bad_request(error: Exception) -> BadRequest:
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


async def _answer_error(request: Request, error: Exception) -> Response:
    bad, form = _as_bad_request(error), openai_error
    if _is_for_anthropic(request):
        from agentloop.gateway.anthropic_messages import error as form
    return _json(form(bad), bad.status)


def _is_for_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers or "/v1/messages" in request.url.path


@dataclass(frozen=True)
class _Replies:
    """An endpoint that answers with a reply of the policy."""

    sessions: OpenSessions
    module: str
    """The protocol's module in this folder."""
    ping_seconds: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session, body = await _open_session(self.sessions, Request(scope, receive))
        protocol = _load_protocol(self.module)
        request = protocol.read(body, session.find_reply)
        gone = asyncio.ensure_future(receive())  # only a disconnect can still be received
        replying = asyncio.ensure_future(session.reply(request, gone))
        begun, end = False, b""
        try:
            while request.stream and not (await asyncio.wait([replying], timeout=self.ping_seconds))[0]:
                if not begun:
                    await _send_head(send, request)
                begun = True
                await _send_part(send, protocol.PING)
            reply = await replying
            if request.stream:  # the last part is held back, so that the client still waits for it
                *parts, end = protocol.events(request, reply)
            else:
                parts = [json_bytes(protocol.answer(request, reply))]
            if not begun:
                await _send_head(send, request)
            await _send_part(send, b"".join(parts))
            await _send_part(send, b"")  # returns once the client has read most of it, or has disconnected
            for _ in range(_LOOP_TURNS):
                await asyncio.sleep(0)
            if not gone.done():
                session.mark_delivered(reply)
        except Exception as error:
            if not begun:
                raise
            if not isinstance(error, _SHOWN_ERRORS):
                _log.exception("a request failed")
            end = protocol.error_event(_as_bad_request(error))
        finally:
            gone.cancel()
        await send({"type": "http.response.body", "body": end})


@cache
def _load_protocol(module: str) -> ProviderProtocol:
    found = cast(ProviderProtocol, import_module(f"agentloop.gateway.{module}"))
    # Loaded modules stay. Searching them for garbage delayed all waiting requests by 90 ms now and then.
    gc.collect()
    gc.freeze()
    return found


async def _send_head(send: Send, request: AgentRequest) -> None:
    headers = [(b"content-type", b"text/event-stream" if request.stream else b"application/json")]
    if request.overruled:
        headers.append((b"x-agentloop-overruled", ", ".join(request.overruled).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})


async def _count_tokens(sessions: OpenSessions, request: Request) -> Response:
    from agentloop.gateway import anthropic_messages

    session, body = await _open_session(sessions, request)
    tokens = await session.count_tokens(anthropic_messages.read(body))
    return _json(anthropic_messages.token_count(tokens))


async def _models(sessions: OpenSessions, request: Request) -> Response:
    """Answer with the models, in the form of the provider whose client asks."""
    await sessions.check(*_episode_and_key(request))
    if _is_for_anthropic(request):
        from agentloop.gateway.anthropic_messages import model, model_list
    else:
        from agentloop.gateway.chat_completions import model, model_list
    name = request.path_params.get("model")
    if name is None:
        return _json(model_list([MODEL, ASIDE]))
    read_agent(name)
    return _json(model(name))


async def _reward(sessions: OpenSessions, request: Request) -> Response:
    """Take `{"reward": number}` or `{"rewards": {agent: number}}`; `"end": true` ends the episode."""
    session, body = await _open_session(sessions, request)
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


async def _open_session(sessions: OpenSessions, request: Request) -> tuple[AgentSession, dict[str, Any]]:
    """Open the session that a request names, and read the request's body."""
    await sessions.check(*_episode_and_key(request))
    body = json_object(await read_body(request))
    return await sessions.authorize(*_episode_and_key(request)), body


def _episode_and_key(request: Request) -> tuple[str, str]:
    """Return the episode's name and the key."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    key = request.headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
    if not key:
        raise BadRequest(
            401, "The key must stand in the header Authorization: Bearer KEY, or x-api-key.", code="invalid_api_key"
        )
    return request.path_params["episode"], key


def check_key(key: str | None, given: str, *, whose: str) -> None:
    """Check the given key; None opens to everybody who reaches the gateway. Raises BadRequest for any other key."""
    if key is None:
        return
    right, got = (text.encode("utf-8", "surrogatepass") for text in (key, given))
    if not hmac.compare_digest(right, got):
        raise BadRequest(403, f"The key must be {whose}, got another.")


def _json(value: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json_bytes(value), status, media_type="application/json")
