"""Finds the engines that a run's configuration names: for the learner, and for every worker."""

from __future__ import annotations

import time
from collections.abc import Callable

from agentloop.config import RunConfig
from agentloop.errors import UserError
from agentloop.generation.remote.engine_client import EngineLimits, RemoteEngine
from agentloop.generation.remote.server_facts import read_key

_LOOK_AGAIN_S = 2.0


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
    deadline, waited = time.monotonic() + section.restart_timeout_s, False
    while True:
        try:
            engine = RemoteEngine.connect(
                section.urls,
                section.served_model_name,
                key=key,
                stop_ids=stop_ids,
                vocab_size=vocab_size,
                limits=limits,
            )
            break
        except UserError as error:
            if time.monotonic() >= deadline:
                raise
            if not waited:
                note(f"waiting for the engines, for {section.restart_timeout_s:g} s at most: {error}")
            waited = True
            time.sleep(_LOOK_AGAIN_S)
    longest = engine.max_model_len
    if longest is not None and longest < config.context.max_tokens:
        raise UserError(
            f"context.max_tokens must be at most {longest}, what the engines take, got {config.context.max_tokens}. "
            "Lower it, or start the engines with a larger --max-model-len."
        )
    return engine
