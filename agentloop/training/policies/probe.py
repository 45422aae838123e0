"""What an engine is asked about, and the learner's own word on it."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from agentloop.engines.publish.engine_control import LIKELIEST
from agentloop.engines.publish.published_policy import NumberType, Probe
from agentloop.models.policy_weights import PolicyWeights, RowScores
from replay.records import Trajectory

_TEXTS = (
    "The capital of France is",
    "2 + 2 = 4, and 17 * 23 =",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return",
    '{"name": "search", "arguments": {"query": "weather in',
    "Naïve “quotes”, 東京, 🙂 and  two spaces:",
    "Question: which of the two is heavier?\nAnswer:",
    "<b>Once</b> upon a time there was a",
    "1. Open the file.\n2. Read a line.\n3.",
)
_ROWS, _TOKENS = 16, 64
"""A thousand tokens in all: more tell smaller changes of the weights, by the square root of their number."""

Rows = tuple[tuple[int, ...], ...]


def probe_rows(trajectories: Sequence[Trajectory]) -> Rows:
    """The ends of the last replies of some trajectories, at even distances among all."""
    step = max(1, len(trajectories) // _ROWS)
    rows = (_last_words(trajectory) for trajectory in trajectories[::step][:_ROWS])
    return tuple(row for row in rows if len(row) > 1)


def _last_words(trajectory: Trajectory) -> tuple[int, ...]:
    tokens = trajectory.segments[-1].tokens
    sampled = (tokens.policy_versions >= 0).nonzero()[0]
    end = int(sampled[-1]) + 1 if len(sampled) else len(tokens)
    return tuple(tokens.token_ids[max(0, end - _TOKENS - 1) : end].tolist())


class Prober:
    """Scores the same tokens with the weights before an update and with those after it."""

    def __init__(self, weights: PolicyWeights, number_type: NumberType, temperature: float) -> None:
        """`number_type` is the engines'; `temperature` that of sampling."""
        self._weights = weights
        self._number_type = number_type
        self._temperature = temperature
        self._rows: Rows = ()
        self._before: tuple[tuple[float, ...], ...] = ()

    def remember(self, rows: Rows) -> None:
        """The weights are about to change: they are asked about these rows now, and engines will be afterwards."""
        self._rows = rows
        self._before = tuple(row.log_probs for row in self._scores(rows)) if rows else ()

    def probe(self, tokenizer: PreTrainedTokenizerBase) -> Probe:
        """The probe of the weights as they are; of fixed texts where no trajectories were remembered."""
        text = "\n".join(_TEXTS)
        rows = self._rows or tuple(_encoded(tokenizer, part) for part in _TEXTS)
        found = self._scores(rows)
        return Probe(
            number_type=self._number_type,
            temperature=self._temperature,
            rows=rows,
            log_probs=tuple(row.log_probs for row in found),
            rounding=tuple(row.rounding for row in found),
            before=self._before or None,
            next_ids=tuple(row.next_ids for row in found),
            next_log_probs=tuple(row.next_log_probs for row in found),
            next_rounding=tuple(row.next_rounding for row in found),
            text=text,
            text_ids=_encoded(tokenizer, text),
        )

    def _scores(self, rows: Rows) -> list[RowScores]:
        return self._weights.scores(rows, number_type=self._number_type, temperature=self._temperature, most=LIKELIEST)


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))
