"""The job people come for, in two iterations: train, be killed, resume, look at the report."""

import subprocess
from pathlib import Path

from tests.fakes.processes import AGENTLOOP, Moments, Training, assert_sound, write_config
from tests.fakes.runs import small_config


def test_run_that_is_killed_goes_on_to_its_end_and_is_reported(tmp_path: Path, qwen2: Path) -> None:
    config = write_config(small_config(tmp_path / "runs", qwen2, run={"iterations": 2}), tmp_path / "run.yaml")
    run = tmp_path / "runs" / "small-001"
    moments = Moments(run, every=1)
    assert Training(config).kill_when(lambda: moments.saved == 1)
    resumed = Training(run, "--resume")
    assert resumed.wait() == 0, resumed.errors
    assert_sound(run, iterations=2)
    subprocess.run([AGENTLOOP, "report", run], check=True, capture_output=True)
    assert "small-001" in (run / "report.html").read_text(encoding="utf-8")
