"""Read-only questions. Every answer is plain and JSON-able: what is unknown is None, and no number is NaN.

The terminal (`agentloop replay ...`) and the inspector ask the same ones.
"""

from replay.stats.distributions import distributions
from replay.stats.iteration import iteration
from replay.stats.listing import Patience, page
from replay.stats.preview import preview, rows_to_read
from replay.stats.progress import progress
from replay.stats.rows import Answer, Question, Sort, chosen
from replay.stats.runs import run_names, runs
from replay.stats.series import merged_series, merging, metric_series
from replay.stats.summary import summary
from replay.stats.task import task
from replay.stats.tokens import MOST_TOKENS, CodecOf, tokens
from replay.stats.trajectory import find, overview, same_tokenizer, trajectory

__all__ = [
    "MOST_TOKENS",
    "Answer",
    "CodecOf",
    "Patience",
    "Question",
    "Sort",
    "chosen",
    "distributions",
    "find",
    "iteration",
    "merged_series",
    "merging",
    "metric_series",
    "overview",
    "page",
    "preview",
    "progress",
    "rows_to_read",
    "run_names",
    "runs",
    "same_tokenizer",
    "summary",
    "task",
    "tokens",
    "trajectory",
]
