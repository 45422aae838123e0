"""What the configuration says about engines on the other side of HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from replay.setting_types import Positive, PositiveFloat, Section

if TYPE_CHECKING:
    from agentloop.config.run_config import RunConfig


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"each of engine.urls must be http://HOST:PORT or https://HOST:PORT, got {url!r}.")
    if parts.username is not None or parts.password is not None:
        # The URL itself would show it.
        raise ValueError(
            "engine.urls must hold no user and no password, got a URL with one. "
            "Put the key into the variable that engine.api_key_env names."
        )
    return url.rstrip("/")


EngineUrl = Annotated[str, AfterValidator(_checked_url)]


class EngineSection(Section):
    urls: tuple[EngineUrl, ...] = Field(
        (), description="Where vLLM listens, as http://HOST:PORT; each serves the same model."
    )
    served_model_name: str | None = Field(
        None, description="What the engines call the model; null: whatever model they serve."
    )
    api_key_env: str = Field(
        "AGENTLOOP_ENGINE_KEY",
        pattern="^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable that holds the engines' key; the key itself is never stored or logged.",
    )
    concurrency: Positive = Field(64, description="Most replies under way at once, over all engines.")
    turn_timeout_s: PositiveFloat = Field(
        600.0, description="Seconds after which a reply under way is given up, with all its tries."
    )


def check_engine(config: RunConfig) -> None:
    """URLs belong to an engine that has some."""
    urls, engine = config.engine.urls, config.rollout.engine
    if engine == "vllm" and not urls:
        raise ValueError(
            "engine.urls must name at least one server when rollout.engine is vllm, got none. "
            "Set engine.urls: [http://127.0.0.1:8000]."
        )
    if engine == "local" and urls:
        raise ValueError(
            f"engine.urls must be empty when rollout.engine is local, got {', '.join(urls)}. Set rollout.engine: vllm."
        )
    if len(set(urls)) < len(urls):
        raise ValueError(f"engine.urls must name each server once, got {', '.join(urls)}.")
