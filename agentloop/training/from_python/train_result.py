"""What a run came to, and where it can be looked into and gone on from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentloop.analysis.stored_policies import evaluate_run
from agentloop.rollouts.evaluation import EvaluationReport
from agentloop.runs.run_folder import open_run_folder
from replay.locate import MODEL
from replay.questions import metric_series
from replay.store import ReplayStore


@dataclass(frozen=True)
class TrainResult:
    folder: Path
    iterations: int
    success_before: float
    success_after: float
    report: Path
    exit_code: int
    """0, or 128 + signal when a signal ended the run early."""

    @property
    def model(self) -> Path:
        """The trained model: for `from_pretrained` of transformers, and for `model.path` of another run."""
        return self.folder / MODEL

    def buffer(self) -> ReplayStore:
        """The run's experience, open for reading: for `replay.questions`, and for `read`. Close it in the end."""
        return ReplayStore.open(open_run_folder(self.folder).database, read_only=True)

    def evaluations(self) -> dict[int, float]:
        """Held-out success by the iteration after which it was measured; 0: before training."""
        store = self.buffer()
        try:
            series = metric_series(store, open_run_folder(self.folder).run_id, names=["eval/success"])
        finally:
            store.close()
        return {int(iteration): float(value) for iteration, value in series["eval/success"]}

    def evaluate(self, *, tasks: int | None = None, samples: int | None = None) -> EvaluationReport:
        """Held-out success of the trained model, with intervals: what `agentloop evaluate` prints."""
        return evaluate_run(self.folder, tasks=tasks, samples=samples)
