"""What `python -m benchmarks gpu` does, with tiny models on a CPU: all but the figures of a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import MEASURED, PAGE, PARTS, command, ended, facts, goals, lacking, stored, table, written

WHERE = {"card": "a card", "hardware": "a machine", "date": "2026-01-02", "revision": "abc", "libraries": "torch 2"}


def line(part: str, arm: str, outcome: str = MEASURED, where: Any = WHERE, **figures: float) -> dict[str, Any]:
    return {"part": part, "arm": arm, "outcome": outcome, "figures": figures, "where": where}


def write_lines(folder: Path, *lines: dict[str, Any]) -> None:
    (folder / "measured.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))


@pytest.mark.timeout(300)
def test_a_measurement_is_made_once_and_then_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert "llama-1b ours-local: measured on" in capsys.readouterr().out
    assert (tmp_path / "measured.jsonl").read_bytes() == before


@pytest.mark.soak
@pytest.mark.parametrize("part", ["smollm2", "llama-7b-lora"])
def test_both_sides_do_the_work(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = ("ours-local", "trl-transformers")
    monkeypatch.setitem(PARTS, part, replace(PARTS[part], arms=arms))
    assert command(["--part", part, "--tiny", "--folder", str(tmp_path)]) == 0
    ours, theirs = (stored(tmp_path)[part, arm]["figures"] for arm in arms)
    assert all(figures["iteration_s"] > 0 for figures in (ours, theirs))
    assert part != "smollm2" or ours["success_before"] == theirs["success_before"] == theirs["success_after"] == 0


def test_a_measurement_that_takes_too_long_is_ended_and_the_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PARTS, "heads", replace(PARTS["heads"], limit=0.2, arms=("log_probs", "decode_step")))
    write_lines(tmp_path, line("heads", "log_probs", where=facts()), line("decode", "decode_step", where=facts()))
    assert command(["--part", "heads", "--again", "--tiny", "--folder", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("ended after 0.2 s, its limit") == 2
    outcomes = {place: each["outcome"] for place, each in stored(tmp_path).items()}
    late = "ended after 0.2 s, its limit"
    assert outcomes == {
        ("decode", "decode_step"): MEASURED,
        ("heads", "log_probs"): late,
        ("heads", "decode_step"): late,
    }


def test_what_this_call_has_no_time_for_is_left_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "CALL_S", 100.0)
    assert command(["--part", "heads", "--tiny", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "heads log_probs: left to another call, for it may take 460 s\n"
    assert stored(tmp_path) == {}


def test_what_another_card_has_measured_is_measured_on_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PARTS, "heads", replace(PARTS["heads"], limit=0.2))
    write_lines(tmp_path, line("heads", "log_probs"))
    assert command(["--part", "heads", "--tiny", "--folder", str(tmp_path)]) == 1
    assert stored(tmp_path)["heads", "log_probs"]["outcome"] != MEASURED


def test_a_program_that_is_ended_leaves_nothing_running(tmp_path: Path) -> None:
    start = "import subprocess; started = subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    note = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(started.pid))"
    outcome, _, _ = ended(["timeit", "-n", "1", "-s", f"{start}; {note}", "started.wait()"], tmp_path / "log", 4)
    assert outcome == "ended after 4 s, its limit"
    started = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(started) or psutil.Process(started).status() == psutil.STATUS_ZOMBIE


def test_a_program_that_fails_says_why(tmp_path: Path) -> None:
    outcome, _, _ = ended(["benchmarks.no_such_module"], tmp_path / "log", 60)
    assert outcome.startswith("failed: ") and outcome.endswith("No module named benchmarks.no_such_module")


def test_what_is_missing_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AGENTLOOP_VLLM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert lacking("smollm2", "ours-vllm", tiny=True) == "vllm must be on the PATH, or be named by AGENTLOOP_VLLM"
    monkeypatch.setattr(gpu, "SMOLLM2", gpu.ROOT / "models" / "none")
    assert lacking("llama-1b", "ours-local", tiny=False) == "models/none must be there: make real-model"
    assert lacking("llama-1b", "ours-local", tiny=True) is None
    assert lacking("decode", "decode_step", tiny=False) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--part", "smollm2", "--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("gpu must run on a machine with a CUDA device, got none.")


def test_parts_are_listed_with_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path, line("heads", "log_probs"), line("decode", "decode_step", "failed: out of memory"))
    assert command(["--folder", str(tmp_path)]) == 0
    listed = dict(text.split(maxsplit=1) for text in capsys.readouterr().out.splitlines())
    assert listed.keys() == PARTS.keys()
    assert listed["heads"].endswith("measured: log_probs") and listed["decode"].endswith("measured: nothing")


def test_without_measurements_the_page_stays_as_it_is(tmp_path: Path) -> None:
    before = PAGE.read_bytes()
    assert command(["--write", "--folder", str(tmp_path)]) == 0
    assert PAGE.read_bytes() == before


def test_measurements_take_the_place_of_earlier_ones_between_their_marks() -> None:
    page = PAGE.read_text()
    once = written(page, {("heads", "log_probs"): line("heads", "log_probs", tokens=8192.0, memory=0.5)})
    again = written(once, {("heads", "log_probs"): line("heads", "log_probs", memory=0.1)})
    assert "| `memory` | 0.5 | goal <= 0.2   miss |" in once and "| `memory` | 0.1 | goal <= 0.2   PASS |" in again
    assert "| `tokens` | 8.19e+03 |" in once and "8.19e+03" not in again
    for changed in (once, again):
        assert changed.partition("<!-- gpu, heads -->")[0] == page.partition("<!-- gpu, heads -->")[0]
        end = "<!-- gpu, end of heads -->"
        assert changed.partition(end)[2] == page.partition(end)[2]
    with pytest.raises(ValueError, match="must hold"):
        written("a page", {})


def test_a_table_compares_iterations_and_says_where_they_were_made_and_what_was_not() -> None:
    made = [
        line("smollm2", "ours-local", iteration_s=1.5, publish_s=0.5),
        line("smollm2", "ours-vllm", iteration_s=1.0, publish_s=0.5),
        line("smollm2", "trl-transformers", iteration_s=3.0),
        line("smollm2", "trl-vllm-colocated", "failed: no memory", WHERE | {"revision": "def"}),
    ]
    assert table("smollm2", {each["arm"]: each for each in made}).splitlines() == [
        "Measured on 2026-01-02 at abc on a card (a machine; torch 2): ours-local, ours-vllm, trl-transformers.",
        "",
        "Measured on 2026-01-02 at def on a card (a machine; torch 2): trl-vllm-colocated (failed: no memory).",
        "",
        "| figure | ours-local | ours-vllm | trl-transformers | trl-vllm-colocated | |",
        "|---|---|---|---|---|---|",
        "| `iteration_s` | 1.5 | 1 | 3 |  |  |",
        "| `publish_s` | 0.5 | 0.5 |  |  | goal <= 0.3   miss |",
        "| `iteration_s / trl-transformers` | 0.5 |  |  |  | goal <= 0.7   PASS |",
    ]
    assert goals("llama-7b-lora", "ours-vllm") == {"iteration_s / trl-vllm-colocated": "<= 0.9"}
