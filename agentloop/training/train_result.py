"""What `agentloop.train` returns: the run, with its success, its experience and its model."""

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import escape

from agentloop.analysis.stored_policies import Asked, evaluate_run
from agentloop.errors import needing, short_traceback
from agentloop.rollouts.evaluation import EvaluationReport
from agentloop.runs.display import with_interval
from replay.frames import Buffer, open_run
from replay.locate import MODEL
from replay.questions import metric_series

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]


@dataclass(frozen=True, repr=False)
class TrainResult(os.PathLike[str]):
    """The run: its success, its experience, and the places of its model and report."""

    folder: Path
    iterations: int
    success_before: float
    success_after: float
    """`success_before` while `evaluated_after` is 0: nothing was measured since."""
    report: Path
    evaluated_after: int
    """The iteration after which `success_after` was measured; 0 if none was measured after training began."""
    held_out_tasks: int
    exit_code: int
    """0, or 128 + signal when a signal ended the run early."""
    troubles: tuple[str, ...] = ()
    """Signs of trouble, by the names of their limits in `replay.diagnosis`."""
    best: int | None = None
    """Iteration of the policy with the best held-out success."""
    why_ended: str = ""

    @property
    def model(self) -> Path:
        """The trained model, for `from_pretrained` of transformers and for `model.path` of another run."""
        return self.folder / MODEL

    @property
    def buffer(self) -> Buffer:
        """The run's buffer, opened anew for reading, as `replay.open` opens it."""
        return open_run(self.folder)

    @property
    def metrics(self) -> "pandas.DataFrame":
        """A row for each iteration, a column for each metric. Raises UserError where pandas is not installed."""
        with needing("pandas", "run.metrics"):
            import pandas
        with closing(self.buffer) as buffer:
            series = {name: dict(points) for name, points in buffer.ask(metric_series).items()}
        return pandas.DataFrame(series).sort_index().rename_axis("iteration")

    def evaluations(self) -> dict[int, float]:
        """Held-out success by the iteration after which it was measured; 0 is before training."""
        with closing(self.buffer) as buffer:
            series = buffer.ask(metric_series, names=["eval/success"])
        return {int(iteration): float(value) for iteration, value in series["eval/success"]}

    @short_traceback
    def evaluate(
        self, *, tasks: int | None = None, samples: int | None = None, policy: int | str | None = None
    ) -> EvaluationReport:
        """Evaluate the trained model, or the kept `policy` of an iteration, or "best", as `agentloop evaluate` does."""
        return evaluate_run(self.folder, Asked(tasks, samples), policy=policy)

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        shown = self._shown()
        return f"{shown.pop('run')}: {', '.join(f'{name} {text}' for name, text in shown.items())}"

    def _repr_html_(self) -> str:
        """Draw held-out success over iterations, with a small table, as a notebook shows it."""
        points = self.evaluations()
        last = max(points) or 1
        line = " ".join(f"{300 * iteration / last:.1f},{100 - 100 * share:.1f}" for iteration, share in points.items())
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self._shown().items()
        )
        return f"""<svg viewBox="-40 -10 360 140" width="360" role="img" aria-label="held-out success by iteration">
<g font-size="11" fill="currentColor"><text x="-38" y="4">100 %</text><text x="-20" y="104">0</text>
<text x="300" y="118" text-anchor="end">iteration {last}</text></g>
<path d="M0 0V100H300" fill="none" stroke="currentColor"/>
<polyline points="{line}" fill="none" stroke="#2a78d6" stroke-width="2"/></svg>
<table>{rows}</table>"""

    @property
    def held_out_success(self) -> str:
        """Held-out success before and after training, in words."""
        before, after = (with_interval(one, self.held_out_tasks) for one in (self.success_before, self.success_after))
        if not self.evaluated_after:
            return f"{before} before training; it was not measured since (evaluation.every)"
        of_all = f" after iteration {self.evaluated_after} of {self.iterations}"
        return f"{before} -> {after}{of_all * (self.evaluated_after < self.iterations)}"

    def _shown(self) -> dict[str, str]:
        shown = {
            "run": str(self.folder),
            "iterations": str(self.iterations),
            "held-out success": self.held_out_success,
        }
        return shown | ({} if self.best is None else {"best iteration": str(self.best)})
