"""What the buffer's benchmarks store: windows of real text, the Python standard library's own source."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from agentloop.models.tiny import build_tokenizer
from context.authors import ENV, LLM, TEMPLATE, default_authors
from context.messages import Message
from context.tokens.token_sequence import Segment, TokenSequence
from replay import GroupRecord, TaskRecord, Trajectory
from tests.fakes import records

RUN = "benchmark"
TASK = TaskRecord("task", "benchmark", {})
ROWS, TOKENS = 64, 2000
_MESSAGES = 20
_CHARACTERS, _VOCABULARY = 1_000_000, 8_000


@dataclass(frozen=True)
class Corpus:
    text: str
    ids: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    """[N] where in the text each token begins."""


@cache
def corpus() -> Corpus:
    """A million characters with a tokenizer of their own: ids and texts that compress as real ones do."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)[:_CHARACTERS]
    lines = text.splitlines(keepends=True)
    tokenizer = build_tokenizer(lines[::4], vocabulary=_VOCABULARY)
    found = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    starts = np.array([start for start, _ in found.offsets], np.int64)
    return Corpus(text, np.array(found.ids, np.int32), starts)


def make_tokens(random: np.random.Generator, count: int) -> tuple[TokenSequence, str]:
    """A window of the corpus, half of it sampled, in turns of 40 tokens; and its text."""
    source = corpus()
    begin = int(random.integers(len(source.ids) - count))
    authors = default_authors()
    turn = np.repeat([authors.code(name) for name in (TEMPLATE, LLM, ENV, LLM)], [4, 18, 16, 2])
    codes = np.resize(turn, count).astype(np.uint8)
    sampled = authors.is_action(codes)
    tokens = TokenSequence(
        source.ids[begin : begin + count].copy(),
        codes,
        np.where(sampled, -random.exponential(0.3, count), np.nan).astype(np.float32),
        np.where(sampled, 0, -1).astype(np.int32),
    )
    return tokens, source.text[source.starts[begin] : source.starts[begin + count]]


def make_trajectory(random: np.random.Generator, *, iteration: int, slot: int, num_tokens: int = TOKENS) -> Trajectory:
    """Its messages are the text of its tokens."""
    tokens, text = make_tokens(random, num_tokens)
    step = len(text) // _MESSAGES + 1
    messages = [Message("tool", text[at : at + step], author=ENV) for at in range(0, len(text), step)]
    return records.trajectory(
        row_id(iteration, slot),
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
        num_turns=10,
        num_tool_calls=9,
        mean_entropy=None,
        environment="benchmark",
    )


def row_id(iteration: int, slot: int) -> str:
    return f"{iteration:08d}{slot:08d}"


def make_group(iteration: int, size: int = ROWS) -> GroupRecord:
    return records.group(f"group-{iteration}", run=RUN, task=TASK.hash, iteration=iteration, size=size)


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
