"""JSON over HTTP: bodies that every reader takes the same way, answers by providers' types, events of a stream."""

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
    """A request's body. The server reads and forgets what is left of one that is refused."""
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
    """ASCII: what some readers of streams take for the end of a line stands escaped."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """A call's arguments as providers that pass them on as text write them."""
    return json.dumps(arguments, ensure_ascii=False)


def checked(model: type[BaseModel], value: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a provider's own type, as that type takes it."""
    return model.model_validate(value).model_dump(mode="json", by_alias=True, exclude_unset=True)


def kind_of(model: type[BaseModel]) -> str:
    """What a provider's type of event writes as its `type`."""
    return str(get_args(model.model_fields["type"].annotation)[0])


def sse(value: Any, event: str | None = None) -> bytes:
    return (f"event: {event}\n".encode() if event else b"") + b"data: " + json_bytes(value) + b"\n\n"


def openai_error(bad: BadRequest) -> dict[str, Any]:
    kind = "server_error" if bad.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(bad), "type": kind, "param": bad.field, "code": bad.code}}
