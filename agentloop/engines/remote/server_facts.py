"""What an engine's server is asked before anything is sampled: which route it has, which model, how long a text."""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass
from functools import cache

import httpx2
from pydantic import BaseModel, ValidationError

from agentloop.engines.generator import GenerationRequest
from agentloop.engines.remote.routes import CompletionsRoute, GenerateRoute, Route, sampling_fields
from agentloop.engines.remote.vllm_version import check_version
from agentloop.errors import UserError, one_line, shortened

CONNECT_TIMEOUT_S = 5.0
_WARM_UP = httpx2.Timeout(300.0, connect=CONNECT_TIMEOUT_S)
"""A server's first reply may take a minute."""


@dataclass(frozen=True)
class ServerFacts:
    url: str
    model: str
    """What the server calls the model itself, whatever adapters it has."""
    route: Route
    max_model_len: int | None
    """Most tokens of a prompt and its reply; None where the server does not say."""


class EngineAway(UserError):
    """Nothing answers there; it may be about to."""


class _Card(BaseModel):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(BaseModel):
    data: list[_Card]


class _Version(BaseModel):
    version: str


def read_key(variable: str) -> str | None:
    """The engine's key from the environment; None where the variable is not set. No message ever shows it."""
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch(r"[!-~]*", key):
        raise UserError(f"{variable} must be letters, digits and signs without a space. Set it to the engine's key.")
    return key or None


@cache
def trusted() -> ssl.SSLContext:
    """Whom the machine trusts. Reading that takes 40 ms, which a client for each batch of turns would pay each time."""
    return ssl.create_default_context()


def key_headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def ask_server(url: str, *, model: str | None, key: str | None) -> ServerFacts:
    """Ask the server at `url` what it can.

    Raises EngineAway where nothing answers, another UserError where it can't be an engine of this run.
    """
    # An engine is where its URL says: no proxy, and no password file, of this machine's user is asked.
    with httpx2.Client(
        base_url=url, headers=key_headers(key), timeout=_WARM_UP, trust_env=False, verify=trusted()
    ) as client:
        try:
            card = _base_model(client, url, model)
            _check_version(client, url)
            route = _route(client, card.id)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise EngineAway(
                f"engine.urls must answer, got {one_line(error)} from {url}. Start the engine, or change the URL."
            ) from None
    return ServerFacts(url, card.id, route, card.max_model_len)


def _route(client: httpx2.Client, model: str) -> Route:
    """The route that says which weights sampled, where it is open."""
    route = GenerateRoute()
    request = GenerationRequest(episode=0, prompt_ids=[0], max_new_tokens=1)
    answer = client.post(route.path, json=route.body(model, request, sampling_fields(1.0, [], 1)))
    if answer.status_code >= httpx2.codes.INTERNAL_SERVER_ERROR:
        answer.raise_for_status()
    return route if answer.status_code == httpx2.codes.OK else CompletionsRoute()


def _check_version(client: httpx2.Client, url: str) -> None:
    try:
        version = _Version.model_validate_json(client.get("/version").raise_for_status().content).version
    except (httpx2.HTTPStatusError, ValidationError):
        version = "none"
    check_version(version, key="engine.urls", where=url)


def _base_model(client: httpx2.Client, url: str, model: str | None) -> _Card:
    answer = client.get("/v1/models")
    if answer.status_code in (401, 403):
        raise UserError(
            f"the variable that engine.api_key_env names must hold the engine's key, got status "
            f"{answer.status_code} from {url}. Set it to the --api-key the engine was started with."
        )
    try:
        answer.raise_for_status()
        cards = [card for card in _Cards.model_validate_json(answer.content).data if card.parent is None]
    except (httpx2.HTTPStatusError, ValidationError) as error:
        text = f"status {answer.status_code}" if isinstance(error, httpx2.HTTPStatusError) else "no list of models"
        raise UserError(f"engine.urls must name vLLM servers, got {text} from {url}/v1/models.") from None
    found = next((card for card in cards if model in (None, card.id)), None)
    if found is None:
        served = shortened(", ".join(card.id for card in cards)) or "none"
        raise UserError(
            f"engine.served_model_name must be a model that {url} serves ({served}), got {model}. "
            "Change it, or leave it out."
        )
    return found
