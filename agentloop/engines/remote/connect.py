"""Finds the engines that a run's configuration names: for the learner, and for every worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from agentloop.config import RunConfig
from agentloop.engines.remote.engine_client import EngineLimits, RemoteEngine
from agentloop.engines.remote.server_facts import EngineAway, read_key
from agentloop.engines.remote.starter import last_end
from agentloop.errors import UserError

_LOOK_AGAIN_S, _SAY_AGAIN_S = 2.0, 30.0


def connect_engine(
    config: RunConfig,
    *,
    stop_ids: frozenset[int],
    vocab_size: int,
    run: Path,
    note: Callable[[str], None],
) -> RemoteEngine:
    """Wait until each of `engine.urls` answers, unless `agentloop engine`, which was to start it, ends before.

    `run` is the run's folder. Raises UserError where one does not answer, or can't be this run's engine.
    """
    section, key = config.engine, read_key(config.engine.api_key_env)
    limits = EngineLimits(
        concurrency=section.concurrency,
        turn_timeout_s=section.turn_timeout_s,
        restart_timeout_s=section.restart_timeout_s,
    )
    began, deadline, say_at = time.time(), time.monotonic() + section.restart_timeout_s, 0.0
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
        except EngineAway as error:
            earlier = _earlier_end(section.urls, (run, run.parent), began)
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            if time.monotonic() >= say_at:
                note(f"waiting for the engines, for {left:.0f} s at most: {error}{earlier}")
                say_at = time.monotonic() + _SAY_AGAIN_S
            time.sleep(_LOOK_AGAIN_S)
    longest = engine.max_model_len
    if longest is not None and longest < config.context.max_tokens:
        raise UserError(
            f"context.max_tokens must be at most {longest}, what the engines take, got {config.context.max_tokens}. "
            "Lower it, or start the engines with a larger --max-model-len."
        )
    return engine


def _earlier_end(urls: Sequence[str], folders: Sequence[Path], began: float) -> str:
    """What to say of starters that had ended before. Raises UserError where one has ended since."""
    said = ""
    for url in urls:
        when, reason = last_end(folders, url) or (0.0, "")
        if when >= began:
            raise UserError(
                f"engine.urls must answer, got nothing from {url}, whose `agentloop engine` has ended: {reason} "
                "Start it again, then this."
            )
        if reason:
            said += f" The last `agentloop engine` there has ended: {reason}"
    return said
