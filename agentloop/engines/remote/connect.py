"""Finds the engines that a run's configuration names: for the learner, and for every worker."""

from __future__ import annotations

import time
from collections.abc import Callable

from agentloop.config import RunConfig
from agentloop.engines.remote.engine_client import EngineLimits, RemoteEngine
from agentloop.engines.remote.server_facts import EngineAway, ServerFacts, ask_server, read_key
from agentloop.errors import UserError

_LOOK_AGAIN_S, _SAY_AGAIN_S = 2.0, 30.0


def connect_engine(
    config: RunConfig, *, stop_ids: frozenset[int], vocab_size: int, note: Callable[[str], None]
) -> RemoteEngine:
    """Wait until each of `engine.urls` answers. Raises UserError where one does not, or can't be this run's engine."""
    section, key = config.engine, read_key(config.engine.api_key_env)
    limits = EngineLimits(
        concurrency=section.concurrency,
        turn_timeout_s=section.turn_timeout_s,
        restart_timeout_s=section.restart_timeout_s,
    )
    servers = _answering(config, key, note)
    engine = RemoteEngine(servers, key=key, stop_ids=stop_ids, vocab_size=vocab_size, limits=limits)
    longest = min((s.max_model_len for s in servers if s.max_model_len is not None), default=None)
    if longest is not None and longest < config.context.max_tokens:
        raise UserError(
            f"context.max_tokens must be at most {longest}, what the engines take, got {config.context.max_tokens}. "
            "Lower it, or start the engines with a larger --max-model-len."
        )
    return engine


def _answering(config: RunConfig, key: str | None, note: Callable[[str], None]) -> list[ServerFacts]:
    section = config.engine
    deadline, say_at = time.monotonic() + section.restart_timeout_s, 0.0
    while True:
        try:
            return [ask_server(url, model=section.served_model_name, key=key) for url in section.urls]
        except EngineAway as error:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            if time.monotonic() >= say_at:
                note(f"waiting for the engines, for {left:.0f} s at most: {error}")
                say_at = time.monotonic() + _SAY_AGAIN_S
            time.sleep(_LOOK_AGAIN_S)
