"""Read-only questions about a buffer. Answers are plain JSON values: None is unknown, and no number is NaN."""

from replay.questions.cluster import cluster, is_collected_by_workers
from replay.questions.filters.query import Query, QueryResult, RowCondition, Sort, chosen
from replay.questions.iteration import held_out, held_out_task, iteration
from replay.questions.listing import Patience, page, run_labels_of, sampled_rows
from replay.questions.runs import metric_series, progress, run_names, runs
from replay.questions.summary import distributions, summary
from replay.questions.tasks import TaskSort, task, task_list, task_success
from replay.questions.tokens import MOST_TOKENS, CodecOf, tokens
from replay.questions.trajectory import excerpts, find, overview, same_tokenizer, trajectory

__all__ = [
    "MOST_TOKENS",
    "QueryResult",
    "CodecOf",
    "Patience",
    "Query",
    "RowCondition",
    "Sort",
    "TaskSort",
    "chosen",
    "cluster",
    "distributions",
    "excerpts",
    "find",
    "held_out",
    "held_out_task",
    "is_collected_by_workers",
    "iteration",
    "metric_series",
    "overview",
    "page",
    "progress",
    "run_labels_of",
    "run_names",
    "runs",
    "same_tokenizer",
    "sampled_rows",
    "summary",
    "task",
    "task_list",
    "task_success",
    "tokens",
    "trajectory",
]
