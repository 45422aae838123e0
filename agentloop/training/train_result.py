"""What `agentloop.train` returns: the run, with its success, its experience and its model."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from agentloop.analysis.stored_policies import Asked, evaluate_run
from agentloop.rollouts.evaluation import EvaluationReport
from agentloop.runs.run_folder import open_run_folder
from replay.locate import MODEL
from replay.questions import metric_series
from replay.store import ReplayStore


@dataclass(frozen=True)
class TrainResult:
    """The result of a run: its success, and the places of its model and report."""

    folder: Path
    iterations: int
    success_before: float
    success_after: float
    report: Path
    evaluated_after: int
    """The iteration after which `success_after` was measured; 0 if none was measured after training began."""
    held_out_tasks: int
    exit_code: int
    """0, or 128 + signal when a signal ended the run early."""
    troubles: tuple[str, ...] = ()
    """Signs of trouble, by the names of their limits in `replay.diagnosis`."""

    @property
    def model(self) -> Path:
        """The trained model, for `from_pretrained` of transformers and for `model.path` of another run."""
        return self.folder / MODEL

    def buffer(self) -> ReplayStore:
        """Open the run's buffer for reading: for `replay.questions`, and for `read`. The caller closes it."""
        return ReplayStore.open(open_run_folder(self.folder).database, read_only=True)

    def evaluations(self) -> dict[int, float]:
        """Held-out success by the iteration after which it was measured; 0 is before training."""
        with closing(self.buffer()) as store:
            series = metric_series(store, open_run_folder(self.folder).run_id, names=["eval/success"])
        return {int(iteration): float(value) for iteration, value in series["eval/success"]}

    def evaluate(self, *, tasks: int | None = None, samples: int | None = None) -> EvaluationReport:
        """Evaluate the trained model on held-out tasks, with intervals, as `agentloop evaluate` does."""
        return evaluate_run(self.folder, Asked(tasks, samples))
