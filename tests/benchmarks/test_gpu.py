"""What `python -m benchmarks gpu` does, with tiny models on a CPU: all but the figures of a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import MEASURED, PARTS, command, ended, stored
from tests import gpu


@pytest.mark.timeout(300)
def test_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(PARTS, "llama-1b", replace(PARTS["llama-1b"], arms=("ours-local",)))
    words = ["--part", "llama-1b", "--tiny", "--folder", str(tmp_path)]
    assert command(words) == 0
    assert "llama-1b ours-local: measured\n" in capsys.readouterr().out
    (made,) = stored(tmp_path).values()
    assert made["outcome"] == MEASURED and made["where"]["libraries"].startswith(f"torch {torch.__version__}")
    phases = [made["figures"][f"{phase}_s"] for phase in ("collect", "update", "publish")]
    assert 0 < sum(phases) <= made["figures"]["iteration_s"]
    # 8 episodes of at most 8 tokens, and one of at least one each
    assert 8 <= made["figures"]["sampled_tokens_per_s"] * phases[0] <= 64
    before = (tmp_path / "measured.jsonl").read_bytes()
    assert command(words) == 0
    printed = capsys.readouterr().out
    assert "llama-1b ours-local: has been measured" in printed and "| `iteration_s` |" in printed
    assert (tmp_path / "measured.jsonl").read_bytes() == before


def test_a_program_that_fails_or_takes_too_long_is_named_so(tmp_path: Path) -> None:
    outcome, _ = ended(["benchmarks.no_such_module"], tmp_path / "log", 60)
    assert outcome.startswith("failed: ") and outcome.endswith("No module named benchmarks.no_such_module")
    assert ended(["timeit", "while True: pass"], tmp_path / "log", 0.2)[0] == "ended after 0.2 s, its limit"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--part", "smollm2", "--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("gpu must run on a machine with a CUDA device, got none.")
    assert gpu.main() == 2
    said = "make gpu must run on a machine with a CUDA device, got none. `make test` needs none.\n"
    assert capsys.readouterr().err == said
