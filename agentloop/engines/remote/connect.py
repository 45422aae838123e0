"""Finds the engines that a run's configuration names: for the learner, and for every worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from agentloop.config import RunConfig
from agentloop.engines.remote.engine_client import EngineLimits, RemoteEngine
from agentloop.engines.remote.server_facts import EngineAway, ServerFacts, ask_server, read_key
from agentloop.errors import TrainingStopped, UserError, one_line

_LOOK_AGAIN_S, _SAY_AGAIN_S = 2.0, 30.0


def connect_engine(
    config: RunConfig, *, stop_ids: frozenset[int], vocab_size: int, run: Path, note: Callable[[str], None]
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
    servers = _answering(config, key, (run, run.parent), note)
    engine = RemoteEngine(servers, key=key, stop_ids=stop_ids, vocab_size=vocab_size, limits=limits)
    longest = min((s.max_model_len for s in servers if s.max_model_len is not None), default=None)
    if longest is not None and longest < config.context.max_tokens:
        raise UserError(
            f"context.max_tokens must be at most {longest}, what the engines take, got {config.context.max_tokens}. "
            "Lower it, or start the engines with a larger --max-model-len."
        )
    return engine


def _answering(
    config: RunConfig, key: str | None, folders: Sequence[Path], note: Callable[[str], None]
) -> list[ServerFacts]:
    section = config.engine
    began, deadline, say_at = time.time(), time.monotonic() + section.restart_timeout_s, 0.0
    while True:
        try:
            return [ask_server(url, model=section.served_model_name, key=key) for url in section.urls]
        except EngineAway as error:
            ended = _ended(section.urls, folders, since=began)
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            if time.monotonic() >= say_at:
                note(f"waiting for the engines, for {left:.0f} s at most: {error}{ended}")
                say_at = time.monotonic() + _SAY_AGAIN_S
            time.sleep(_LOOK_AGAIN_S)


@contextmanager
def noted_end(folder: Path, port: int) -> Iterator[None]:
    """Within, an engine is started and watched at this port; why that ended is then in a file of `folder`.

    Learners and workers read it, so that none waits for what will not come.
    """
    note = _note(folder, port)
    note.parent.mkdir(parents=True, exist_ok=True)
    note.unlink(missing_ok=True)
    reason = "it was stopped"
    try:
        yield
    except BaseException as error:
        reason = str(error) if isinstance(error, (UserError, TrainingStopped)) else one_line(error)
        raise
    finally:
        note.write_text(reason)


def _ended(urls: Sequence[str], folders: Sequence[Path], *, since: float) -> str:
    """What to say of starters that ended before. Raises UserError where one has ended since then."""
    said = ""
    for url in urls:
        for note in (_note(folder, urlsplit(url).port or 0) for folder in folders):
            if note.exists():
                if note.stat().st_mtime >= since:
                    raise UserError(
                        f"engine.urls must answer, got nothing from {url}, whose `agentloop engine` has ended: "
                        f"{note.read_text()} Start it again, then this."
                    )
                said += f" The last `agentloop engine` there has ended: {note.read_text()}"
    return said


def _note(folder: Path, port: int) -> Path:
    return folder / f"engine-{port}.ended"
