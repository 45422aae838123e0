"""What the buffer's benchmarks store: windows of real text, the Python standard library's own source."""

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from agentloop.models.tiny import build_tokenizer
from context.authors import ENV, LLM, TEMPLATE, default_authors
from context.messages import Message
from context.tokens.token_sequence import Segment, TokenSequence
from replay import TaskRecord, Trajectory
from tests.fakes import records

RUN = "benchmark"
TASK = TaskRecord("task", "benchmark", {})
ROWS, TOKENS = 64, 2000
_MESSAGES = 20
_CHARACTERS, _VOCABULARY = 1_000_000, 8_000


@cache
def corpus() -> tuple[str, npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """A million characters with a tokenizer of their own, which compress as real ones do: [N] ids, and their places."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)[:_CHARACTERS]
    lines = text.splitlines(keepends=True)
    tokenizer = build_tokenizer(lines[::4], vocabulary=_VOCABULARY)
    found = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    starts = np.array([start for start, _ in found.offsets], np.int64)
    return text, np.array(found.ids, np.int32), starts


def make_trajectory(random: np.random.Generator, *, iteration: int, slot: int, num_tokens: int = TOKENS) -> Trajectory:
    """A window of the corpus, half of it sampled, in turns of 40 tokens; its messages are their text."""
    whole, ids, starts = corpus()
    begin = int(random.integers(len(ids) - num_tokens))
    window, authors = slice(begin, begin + num_tokens), default_authors()
    turn = np.repeat([authors.code(name) for name in (TEMPLATE, LLM, ENV, LLM)], [4, 18, 16, 2])
    codes = np.resize(turn, num_tokens).astype(np.uint8)
    sampled = authors.is_action(codes)
    log_probs = np.where(sampled, -random.exponential(0.3, num_tokens), np.nan).astype(np.float32)
    tokens = TokenSequence(ids[window].copy(), codes, log_probs, np.where(sampled, 0, -1).astype(np.int32))
    text = whole[starts[begin] : starts[window.stop]]
    step = len(text) // _MESSAGES + 1
    messages = [Message("tool", text[at : at + step], author=ENV) for at in range(0, len(text), step)]
    return records.trajectory(
        f"{iteration:08d}{slot:08d}",
        segments=(Segment(tokens),),
        messages=tuple(messages),
        run=RUN,
        group=f"group-{iteration}",
        task=TASK.hash,
        iteration=iteration,
        slot=slot,
        member=slot,
        reward=float(slot % 2),
        success=bool(slot % 2),
        advantage=float(slot % 7 - 3),
        environment="benchmark",
    )


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
