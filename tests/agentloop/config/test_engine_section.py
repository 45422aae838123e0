"""Engines of a configuration: URLs belong to `rollout.engine: vllm`, and hold no key."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from agentloop.config import RunConfig


def refusal(**sections: object) -> str:
    with pytest.raises(ValidationError) as refused:
        RunConfig.model_validate(sections)
    return str(refused.value)


def test_urls_are_taken_without_the_slash_at_their_end() -> None:
    config = RunConfig.model_validate(
        {"rollout": {"engine": "vllm"}, "engine": {"urls": ["http://127.0.0.1:8000/", "https://gpu:443/engine"]}}
    )
    assert config.engine.urls == ("http://127.0.0.1:8000", "https://gpu:443/engine")
    assert config.engine.api_key_env == "AGENTLOOP_ENGINE_KEY"


def test_an_engine_without_urls_is_refused() -> None:
    assert "engine.urls must name at least one server when rollout.engine is vllm" in refusal(
        rollout={"engine": "vllm"}
    )


def test_urls_without_an_engine_are_refused() -> None:
    assert "engine.urls must be empty when rollout.engine is local, got http://a:1" in refusal(
        engine={"urls": ["http://a:1"]}
    )


def test_the_same_url_twice_is_refused() -> None:
    twice = refusal(rollout={"engine": "vllm"}, engine={"urls": ["http://a:1", "http://a:1/"]})
    assert "engine.urls must name each server once" in twice


@pytest.mark.parametrize("url", ["a:8000", "ftp://a", "http://", "http://a?x=1", "http://a:port", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    assert "must be http://HOST:PORT or https://HOST:PORT" in refusal(engine={"urls": [url]})


def test_a_url_with_a_password_is_refused_without_showing_it() -> None:
    refused = refusal(engine={"urls": ["http://me:hidden@a:8000"]})
    assert "engine.urls must hold no user and no password" in refused
    assert "hidden" not in refused
