"""JSON over HTTP: strict reading of bodies, answers in providers' types, and events of a stream."""

import json
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel
from starlette.requests import Request

from agentloop.gateway.agent_request import BadRequest
from context.parse.json_calls import strict_json
from context.parse.reply import Malformed

MAX_BODY_BYTES = 32 * 2**20


async def read_body(request: Request) -> bytes:
    """Read a request's body. If the body is too long, the server discards the rest."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise BadRequest(413, f"The body must have at most {MAX_BODY_BYTES} bytes, got more.")
    return bytes(body)


def json_object(body: bytes) -> dict[str, Any]:
    try:
        value = strict_json(body.decode())
    except UnicodeDecodeError:
        raise BadRequest(400, "The body must be JSON in UTF-8, got other bytes.") from None
    except Malformed as problem:
        wrong = str(problem).replace("a tool call", "it")
        raise BadRequest(400, f"The body must be JSON that every reader takes alike: {wrong}.") from None
    if not isinstance(value, dict):
        raise BadRequest(400, "The body must be a JSON object.")
    return value


def json_bytes(value: Any) -> bytes:
    """Write JSON in ASCII: some readers of streams take Unicode's line separators for the end of a line."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """Write a call's arguments as text, for APIs that send arguments as text."""
    return json.dumps(arguments, ensure_ascii=False)


def to_json(model: type[BaseModel], value: Mapping[str, Any]) -> dict[str, Any]:
    """Check a value against a provider's own type, and return it as JSON."""
    return model.model_validate(value).model_dump(mode="json", by_alias=True, exclude_unset=True)


def event_type(model: type[BaseModel]) -> str:
    """Return the `type` that a provider's event class writes."""
    return str(get_args(model.model_fields["type"].annotation)[0])


def sse(value: Any, event: str | None = None) -> bytes:
    return (f"event: {event}\n".encode() if event else b"") + b"data: " + json_bytes(value) + b"\n\n"


def openai_error(bad: BadRequest) -> dict[str, Any]:
    kind = "server_error" if bad.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(bad), "type": kind, "param": bad.field, "code": bad.code}}
