"""What a GPU does with real models, beside TRL on the same card: `make gpu PART=smollm2`.

A part is a few measurements, each a process of its own with a limit of time; one call takes at most eight minutes.
What was measured is a line of a file: a second call leaves it out, and goes on with what failed or had no time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from benchmarks.__main__ import environment
from benchmarks._goals import verdict

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"
CALL_S, PREPARE_S = 480.0, 120.0
MEASURED = "measured"
SIDES = {
    "ours-local": ("_gpu_ours", "local"),
    "ours-vllm": ("_gpu_ours", "vllm"),
    "ours-vllm-file": ("_gpu_ours", "vllm-file"),
    "trl-transformers": ("_gpu_trl", "transformers"),
    "trl-vllm-colocated": ("_gpu_trl", "vllm"),
}
"""Who does the work of a part, and what samples."""
BESIDE = {"ours-local": ("trl-transformers", "<= 0.7"), "ours-vllm": ("trl-vllm-colocated", "<= 0.9")}
"""Whose iteration theirs is compared with, and the goal."""
PUBLISH = {"smollm2": "<= 0.3", "llama-1b": "<= 1.5"}
"""Goals of agentloop's publishes to vLLM by the quickest way, in seconds."""


@dataclass(frozen=True)
class Part:
    says: str
    limit: float
    """Most seconds of each measurement."""
    arms: tuple[str, ...] = tuple(SIDES)


PARTS: dict[str, Part] = {
    "decode": Part("a decode step of the engine in this process", 400, ("decode_step",)),
    "heads": Part("log-probs out of hidden states", 460, ("log_probs",)),
    "smollm2": Part("SmolLM2-135M with a calculator: 16 iterations of 128 episodes", 200),
    "llama-1b": Part("1.3B, random weights: 3 iterations of 128 x 512 tokens", 200),
    "llama-7b-lora": Part(
        "7B, random weights, LoRA: 3 iterations of 64 x 2,048 tokens",
        240,
        ("ours-local", "ours-vllm", "trl-transformers", "trl-vllm-colocated"),  # adapters go in files anyway
    ),
}
Line = Mapping[str, Any]
"""What the file has of one measurement: part, arm, outcome, figures, where."""


def command(arguments: Sequence[str]) -> int:
    """`python -m benchmarks gpu ...`: the exit code is 1 where a measurement failed, and 2 where none can be made."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=PARTS, help="what to measure; without it the parts are listed")
    parser.add_argument("--again", action="store_true", help="forget what was measured of the part before")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU: whether all of it runs here")
    parser.add_argument("--write", action="store_true", help="write what was measured into docs/benchmarks.md")
    parser.add_argument("--folder", type=Path, help="for models, tasks and measured.jsonl; runs/gpu, or runs/gpu-tiny")
    given = parser.parse_args(arguments)
    folder: Path = given.folder or ROOT / "runs" / ("gpu-tiny" if given.tiny else "gpu")
    lines = stored(folder)
    if given.write:
        PAGE.write_text(written(PAGE.read_text(), lines))
        print(f"{PAGE.name} has what was measured" if lines else f"{PAGE.name} stays as it is: nothing was measured")
    elif given.part is None:
        for name, part in PARTS.items():
            done = [arm for arm in part.arms if lines.get((name, arm), {}).get("outcome") == MEASURED]
            print(f"{name:<14} {part.says}; measured: {', '.join(done) or 'nothing'}")
    elif not (given.tiny or torch.cuda.is_available()):
        print("gpu must run on a machine with a CUDA device, got none. --tiny shows the way.", file=sys.stderr)
        return 2
    else:
        if given.again:
            _store(folder, [line for line in lines.values() if line["part"] != given.part])
        return 0 if measure(given.part, folder, tiny=given.tiny) else 1
    return 0


def stored(folder: Path) -> dict[tuple[str, str], Line]:
    """The newest line of each part and arm."""
    file = folder / "measured.jsonl"
    lines = map(json.loads, file.read_text().splitlines() if file.is_file() else ())
    return {(line["part"], line["arm"]): line for line in lines}


def _store(folder: Path, lines: Iterable[Line], *, mode: str = "w") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "measured.jsonl").open(mode) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def measure(name: str, folder: Path, *, tiny: bool) -> bool:
    """Make the measurements of a part that this card has not made; whether all that were begun ended well."""
    part, end, where, well = PARTS[name], time.monotonic() + CALL_S, facts(), True
    lines = stored(folder)
    for arm in part.arms:
        line = lines.get((name, arm), {"outcome": None})
        lacks, most = lacking(name, arm, tiny=tiny), part.limit
        if arm in SIDES and not (folder / name / "model").exists():
            most += PREPARE_S
        if line["outcome"] == MEASURED and line["where"]["card"] == where["card"]:
            say = f"measured on {line['where']['date']} at {line['where']['revision']}. --again repeats the part"
        elif lacks is not None:
            say = f"left out. {lacks}"
        elif time.monotonic() + most > end:
            say = f"left to another call, for it may take {most:g} s"
        else:
            outcome, figures = measured(name, arm, folder, tiny=tiny)
            _store(
                folder, [{"part": name, "arm": arm, "outcome": outcome, "figures": figures, "where": where}], mode="a"
            )
            say = "\n  ".join([outcome, *(f"{figure:<36} {value:,.3g}" for figure, value in figures.items())])
            well &= outcome == MEASURED
        print(f"{name} {arm}: {say}", flush=True)
    return well


def measured(name: str, arm: str, folder: Path, *, tiny: bool) -> tuple[str, dict[str, float]]:
    """What became of one measurement, and its figures."""
    limit, here = PARTS[name].limit, folder / name
    if arm not in SIDES:
        outcome, said, _ = ended(["benchmarks", arm, "--json"], here / arm, limit)
        return outcome, json.loads(said)["benchmarks"][arm] if outcome == MEASURED else {}
    options = [name, str(here), *(["--tiny"] if tiny else [])]
    if not (here / "model").exists():
        outcome, _, _ = ended(["benchmarks._gpu_work", *options], here / "prepare", PREPARE_S)
        if outcome != MEASURED:
            return f"no model: {outcome}", {}
    module, engine = SIDES[arm]
    outcome, said, peak_gb = ended([f"benchmarks.{module}", *options, "--engine", engine], here / arm, limit)
    shutil.rmtree(here / "runs", ignore_errors=True)  # checkpoints of billions of weights
    on_card = {"memory_gb: of the card, at its peak": peak_gb} if peak_gb else {}
    return outcome, json.loads(said) | on_card if outcome == MEASURED else {}


def ended(module: Sequence[str], log: Path, limit: float) -> tuple[str, str, float]:
    """How a module with its options ended, what it printed, and the most GB that the card had in use meanwhile."""
    log.parent.mkdir(parents=True, exist_ok=True)
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
    end, peak = time.monotonic() + limit, 0.0
    with (
        log.with_suffix(".out").open("w+") as printed,
        log.with_suffix(".log").open("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-m", *module], cwd=ROOT, env={**os.environ, **quiet}, stdout=printed, stderr=errors
        ) as process,
    ):
        try:
            while process.poll() is None and time.monotonic() < end:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(min(0.5, limit))
                peak = max(peak, card_gb())
            outcome = MEASURED if process.poll() is not None else f"ended after {limit:g} s, its limit"
        finally:
            if process.poll() is None:
                _kill(process)
        printed.seek(0), errors.seek(0)
        if process.returncode and outcome == MEASURED:
            outcome = f"failed: {([line for line in errors.read().splitlines() if line.strip()] or ['?'])[-1]:.200}"
        return outcome, printed.read(), peak


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With what it has started, in whatever session that is."""
    root = psutil.Process(process.pid)
    tree = [*root.children(recursive=True), root]
    for each in tree:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(tree, timeout=10)  # until then the card's memory is not free


def card_gb() -> float:
    """GB in use on the card, by all processes; 0 without one."""
    if shutil.which("nvidia-smi") is None:
        return 0.0
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={card}"]
    mib = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    return float(mib) * 2**20 / 1e9 if mib.isdigit() else 0.0


def lacking(name: str, arm: str, *, tiny: bool) -> str | None:
    """What a measurement needs and this machine has not, in one line."""
    if arm in SIDES and not (tiny or SMOLLM2.is_dir()):
        return f"{SMOLLM2.relative_to(ROOT)} must be there: make real-model"
    if arm.startswith("ours-vllm") and engine_program() is None:
        return "vllm must be on the PATH, or be named by AGENTLOOP_VLLM"
    needed = ["trl", "datasets", "accelerate", "peft"] if arm.startswith("trl") else []
    needed += ["vllm"] if arm == "trl-vllm-colocated" else []
    missing = " ".join(module for module in needed if find_spec(module) is None)
    return f"{sys.executable} must have {missing}: pip install {missing}" if missing else None


def engine_program() -> str | None:
    """vLLM's, where agentloop finds it."""
    return shutil.which(os.environ.get("AGENTLOOP_VLLM", "vllm"))


def facts() -> dict[str, str]:
    """Where a measurement is made, and with what."""
    machine, libraries, revision = environment(), [], ""
    for library in ("torch", "transformers", "trl", "vllm"):
        with suppress(PackageNotFoundError):
            libraries.append(f"{library} {version(library)}")
    program = engine_program()
    if program is not None:  # it would say so itself, after many seconds
        found = Path(program).parents[1].glob("lib/python*/site-packages/vllm-*.dist-info")
        libraries += [f"vllm {folder.stem.removeprefix('vllm-')} as an engine" for folder in found]
    with suppress(FileNotFoundError):
        git = ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
        revision = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "card": machine.get("gpu", "no card"),
        "hardware": machine["hardware"],
        "date": machine["date"],
        "revision": revision or "an unknown revision",
        "libraries": ", ".join(libraries),
    }


def written(page: str, lines: Mapping[tuple[str, str], Line]) -> str:
    """The page with these measurements between the marks of their parts; what has none stays as it is."""
    for name, part in PARTS.items():
        found = {arm: lines[name, arm] for arm in part.arms if (name, arm) in lines}
        begin, end = f"<!-- gpu, {name} -->", f"<!-- gpu, end of {name} -->"
        before, first, rest = page.partition(begin)
        _, last, behind = rest.partition(end)
        if not (first and last):
            raise ValueError(f"{PAGE.name} must hold {begin!r} and {end!r}, got a page without them.")
        if found:
            page = f"{before}{begin}\n{table(name, found)}\n{end}{behind}"
    return page


def table(name: str, lines: Mapping[str, Line]) -> str:
    """Figures by measurement, with the goals that they have, under where they were made."""
    columns: dict[str, dict[str, float]] = {arm: dict(line["figures"]) for arm, line in lines.items()}
    for arm, (other, _) in BESIDE.items():
        if columns.get(arm) and columns.get(other):
            columns[arm][f"iteration_s / {other}"] = columns[arm]["iteration_s"] / columns[other]["iteration_s"]
    places: dict[str, list[str]] = {}
    for arm, line in lines.items():
        said = "{date} at {revision} on {card} ({hardware}; {libraries})".format_map(line["where"])
        places.setdefault(said, []).append(arm if line["outcome"] == MEASURED else f"{arm} ({line['outcome']})")
    rows = [text for said, arms in places.items() for text in (f"Measured on {said}: {', '.join(arms)}.", "")]
    rows += [f"| figure | {' | '.join(columns)} | |", "|---" * (len(columns) + 2) + "|"]
    for figure in dict.fromkeys(figure for figures in columns.values() for figure in figures):
        having = {arm: figures[figure] for arm, figures in columns.items() if figure in figures}
        values = [f"{having[arm]:,.3g}" if arm in having else "" for arm in columns]
        verdicts = [verdict(figure, value, goals(name, arm)) for arm, value in having.items()]
        rows.append(f"| `{figure}` | {' | '.join(values)} | {' '.join(filter(None, verdicts))} |")
    return "\n".join(rows)


def goals(name: str, arm: str) -> Mapping[str, str]:
    if arm not in SIDES:
        found: Mapping[str, str] = import_module(f"benchmarks.{arm}").GOALS
        return found
    other, goal = BESIDE.get(arm, ("", ""))
    publish = {"publish_s": PUBLISH[name]} if arm == "ours-vllm" and name in PUBLISH else {}
    return publish | ({f"iteration_s / {other}": goal} if other else {})


def main() -> dict[str, float]:
    """For `make bench`, which measures none of this: the list of parts."""
    command([])
    return {}


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
