"""Questions to an engine's server before anything is sampled: its version, its model, and its longest text."""

import os
import re
import ssl
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx2

from agentloop.engines.remote.vllm_protocol import GENERATE, generate_body
from agentloop.errors import UserError, one_line, shortened

LEAST_VERSION = "0.32"
"""The oldest vLLM that works. Older ones name no weights in replies, and do not know `--enable-scale-out`."""
KEY_VARIABLE = "AGENTLOOP_ENGINE_KEY"
"""The environment variable that holds the engines' key, which is never stored or logged."""
CONNECT_TIMEOUT_S = 5.0
_WARM_UP = httpx2.Timeout(300.0, connect=CONNECT_TIMEOUT_S)
"""A server's first reply may take a minute."""


@dataclass(frozen=True)
class ServerFacts:
    url: str
    model: str
    """The server's name for the model itself, without adapters."""
    max_model_len: int | None
    """The most tokens of a prompt and its reply together; None where the server states none."""


class EngineAway(UserError):
    """No server answers at the URL; one may be starting."""


def read_key(variable: str = KEY_VARIABLE) -> str | None:
    """Read the engine's key from the environment; None where the variable is not set. No message shows the key."""
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch(r"[!-~]*", key):
        raise UserError(f"{variable} must be letters, digits and signs without a space. Set it to the engine's key.")
    return key or None


def key_headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


@cache
def trusted_context() -> ssl.SSLContext:
    """Load the machine's trusted certificates, once: that takes 40 ms, too long for every batch of turns."""
    return ssl.create_default_context()


def check_version(version: str, *, key: str, where: str) -> None:
    """Check that vLLM is new enough. Raises UserError, about the setting `key` at `where`."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or tuple(map(int, found.groups())) < tuple(map(int, LEAST_VERSION.split("."))):
        raise UserError(
            f"{key} must be of vLLM {LEAST_VERSION} or newer, got {shortened(version)} at {where}. "
            f"Install it in vLLM's own environment: pip install 'vllm>={LEAST_VERSION}'."
        )


def ask_server(url: str, *, model: str | None = None, key: str | None) -> ServerFacts:
    """Ask the server at `url` for its facts. Raises EngineAway where none answers, UserError for an unfit one.

    `model` is the model's name there; None: the first that it serves.
    """
    url = url.rstrip("/")
    # The client uses the URL alone: no proxy and no password file of this machine's user.
    with httpx2.Client(
        base_url=url, headers=key_headers(key), timeout=_WARM_UP, trust_env=False, verify=trusted_context()
    ) as client:
        try:
            card = _base_model(client, url, model)
            answer = client.get("/version")
            said = re.search(rb'"version":\s*"([^"]*)"', answer.content) if answer.is_success else None
            check_version("none" if said is None else said[1].decode(), key="engine.urls", where=url)
            _warm_up(client, url, card["id"])
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise EngineAway(
                f"engine.urls must answer, got {one_line(error)} from {url}. Start the engine, or change the URL."
            ) from None
    return ServerFacts(url, card["id"], card.get("max_model_len"))


def _warm_up(client: httpx2.Client, url: str, model: str) -> None:
    """Sample a first token. Raises UserError where the server has no route that names a token's weights."""
    answer = client.post(GENERATE, json=generate_body(model, [0], temperature=1.0, max_new_tokens=1))
    if answer.status_code >= httpx2.codes.INTERNAL_SERVER_ERROR:
        answer.raise_for_status()
    if answer.status_code != httpx2.codes.OK:
        raise UserError(
            f"engine.urls must say which weights sampled each token, got status {answer.status_code} from "
            f"{url}{GENERATE}. Start the server with --enable-scale-out, as agentloop engine does."
        )


def _base_model(client: httpx2.Client, url: str, model: str | None) -> dict[str, Any]:
    answer = client.get("/v1/models")
    if answer.status_code in (401, 403):
        raise UserError(
            f"{KEY_VARIABLE} must hold the engine's key, got status {answer.status_code} from {url}. Set it to the "
            "--api-key the engine was started with."
        )
    try:
        answer.raise_for_status()
        cards = {str(card["id"]): card for card in answer.json()["data"] if card.get("parent") is None}
    except (httpx2.HTTPStatusError, ValueError, LookupError, TypeError, AttributeError):
        raise UserError(
            f"engine.urls must name vLLM servers, got no list of models (status {answer.status_code}) from "
            f"{url}/v1/models."
        ) from None
    found: dict[str, Any] | None = next((card for name, card in cards.items() if model in (None, name)), None)
    if found is None:
        served = shortened(", ".join(cards)) or "none"
        raise UserError(
            f"engine.urls must name servers of {model or 'a model'}, got {served} from {url}. Change the URL, or the "
            "model's name."
        )
    return found
