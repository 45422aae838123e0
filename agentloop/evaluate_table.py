"""An evaluation as a table for people."""

from __future__ import annotations

from agentloop.console import percent
from agentloop.estimates import Estimate
from agentloop.evaluate import EvaluationReport

_KINDS = {"wilson": "Wilson", "bootstrap": "bootstrap over tasks"}


def as_table(report: EvaluationReport) -> str:
    """A line per figure: its value, its 95 % confidence interval, and of which kind that is."""
    rows = [(f"pass@{k}", _shares(found), found) for k, found in report.pass_at_k.items()]
    rows += [("mean turns", _numbers(report.mean_turns), report.mean_turns)]
    rows += [("mean reward", _numbers(report.mean_reward), report.mean_reward)]
    rows += [(f"ended: {reason}", _shares(found), found) for reason, found in report.stop_reasons.items()]
    lines = [("", "value", "from", "to", "95 % interval")]
    lines += [(name, *texts, _KINDS[found.interval]) for name, texts, found in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    table = [
        "  ".join((line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in (1, 2, 3)), line[4])) for line in lines
    ]
    return "\n".join([f"evaluated: {report.evaluated}", _head(report), *table])


def _head(report: EvaluationReport) -> str:
    evaluation = report.evaluation
    each = "" if evaluation.samples == 1 else f", {evaluation.samples} samples each"
    lost = f", {evaluation.engine_failures} more lost to the engine" if evaluation.engine_failures else ""
    return f"held-out success: {percent(evaluation.success)} ({evaluation.tasks} tasks{each}{lost})"


def _shares(found: Estimate) -> tuple[str, str, str]:
    return percent(found.value), percent(found.low), percent(found.high)


def _numbers(found: Estimate) -> tuple[str, str, str]:
    return f"{found.value:.2f}", f"{found.low:.2f}", f"{found.high:.2f}"
