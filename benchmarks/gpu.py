"""What a GPU does with real models, agentloop and TRL on the same card: `make gpu PART=smollm2`.

A part is a few measurements, each a process of its own with a limit of time; one call takes at most eight minutes.
What was measured is a line of a file: a second call leaves it out, and goes on with what failed or had no time. Each
call ends with the table of all that was measured of the part.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import environment

ROOT = Path(__file__).parents[1]
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
"""Who does the work of a part, and what samples. Other arms are benchmarks of this folder."""


@dataclass(frozen=True)
class Part:
    purpose: str
    limit: float
    """Most seconds of each measurement."""
    arms: tuple[str, ...] = tuple(SIDES)


PARTS: dict[str, Part] = {
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
"""One measurement: part, arm, outcome, figures, and where it was made."""


def command(arguments: Sequence[str]) -> int:
    """`python -m benchmarks gpu ...`: the exit code is 1 where a measurement failed, and 2 where none can be made."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=PARTS, help="what to measure; without it the parts are listed")
    parser.add_argument("--again", action="store_true", help="measure what has been measured once more")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU: whether all of it runs here")
    parser.add_argument("--folder", type=Path, help="for models, tasks and measured.jsonl; runs/gpu, or runs/gpu-tiny")
    given = parser.parse_args(arguments)
    if given.part is None:
        print("\n".join(f"{name:<14} {part.purpose}" for name, part in PARTS.items()))
        return 0
    if not (given.tiny or torch.cuda.is_available()):
        print("gpu must run on a machine with a CUDA device, got none. --tiny shows the way.", file=sys.stderr)
        return 2
    folder: Path = given.folder or ROOT / "runs" / ("gpu-tiny" if given.tiny else "gpu")
    went_well = measure(given.part, folder, tiny=given.tiny, again=given.again)
    print(table({arm: line for (part, arm), line in stored(folder).items() if part == given.part}))
    return 0 if went_well else 1


def stored(folder: Path) -> dict[tuple[str, str], Line]:
    """The newest line of each part and arm."""
    file = folder / "measured.jsonl"
    lines = map(json.loads, file.read_text().splitlines() if file.is_file() else ())
    return {(line["part"], line["arm"]): line for line in lines}


def measure(name: str, folder: Path, *, tiny: bool, again: bool) -> bool:
    """Make the measurements of a part that this card has not made; whether all that were begun ended well."""
    part, end, where, went_well = PARTS[name], time.monotonic() + CALL_S, facts(), True
    done = {
        arm
        for (of, arm), line in stored(folder).items()
        if of == name and line["outcome"] == MEASURED and line["where"]["card"] == where["card"]
    }
    for arm in part.arms:
        most = part.limit + (PREPARE_S if arm in SIDES and not (folder / name / "model").exists() else 0)
        if arm in done and not again:
            outcome = "has been measured; --again does it once more"
        elif time.monotonic() + most > end:
            outcome = f"left to another call, for it may take {most:g} s"
        else:
            outcome, figures = measured(name, arm, folder / name, tiny=tiny)
            line = {"part": name, "arm": arm, "outcome": outcome, "figures": figures, "where": where}
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "measured.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            went_well &= outcome == MEASURED
        print(f"{name} {arm}: {outcome}", flush=True)
    return went_well


def measured(name: str, arm: str, here: Path, *, tiny: bool) -> tuple[str, dict[str, float]]:
    """What became of one measurement, and its figures."""
    limit = PARTS[name].limit
    if arm not in SIDES:
        outcome, printed = ended(["benchmarks", arm, "--json"], here / arm, limit)
        return outcome, json.loads(printed)["benchmarks"][arm] if outcome == MEASURED else {}
    options = [name, str(here), *(["--tiny"] if tiny else [])]
    if not (here / "model").exists():
        outcome, _ = ended(["benchmarks._gpu_work", *options], here / "prepare", PREPARE_S)
        if outcome != MEASURED:
            return f"no model: {outcome}", {}
    module, engine = SIDES[arm]
    outcome, printed = ended([f"benchmarks.{module}", *options, "--engine", engine], here / arm, limit)
    shutil.rmtree(here / "runs", ignore_errors=True)  # checkpoints of billions of weights
    return outcome, json.loads(printed) if outcome == MEASURED else {}


def ended(module: Sequence[str], log: Path, limit: float) -> tuple[str, str]:
    """How a module with its options ended, and what it printed. Its whole process group ends with it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
    with log.with_suffix(".out").open("w") as printed, log.with_suffix(".log").open("w") as errors:
        command, place = [sys.executable, "-m", *module], {**os.environ, **quiet}
        process = subprocess.Popen(command, cwd=ROOT, env=place, stdout=printed, stderr=errors, start_new_session=True)
        try:
            code = process.wait(limit)
            said = [line for line in log.with_suffix(".log").read_text().splitlines() if line.strip()]
            outcome = MEASURED if code == 0 else f"failed: {(said or ['?'])[-1]:.200}"
        except subprocess.TimeoutExpired:
            outcome = f"ended after {limit:g} s, its limit"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return outcome, log.with_suffix(".out").read_text()


def facts() -> dict[str, str]:
    """Where a measurement is made, and with what."""
    machine, libraries = environment(), []
    for library in ("torch", "transformers", "trl", "vllm"):
        with suppress(PackageNotFoundError):
            libraries.append(f"{library} {version(library)}")
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {
        "card": machine.get("gpu", "no card"),
        "hardware": machine["hardware"],
        "date": machine["date"],
        "revision": git.stdout.strip() or "an unknown revision",
        "libraries": ", ".join(libraries),
    }


def table(lines: Mapping[str, Line]) -> str:
    """Markdown: a row a figure, a column a measurement, under where each was made."""
    made = [
        "{arm}: {outcome} on {date} at {revision}, {card} ({hardware}; {libraries}).".format(**line, **line["where"])
        for line in lines.values()
    ]
    figures = dict.fromkeys(figure for line in lines.values() for figure in line["figures"])
    rows = [f"| figure | {' | '.join(lines)} |", "|---" * (len(lines) + 1) + "|"]
    for figure in figures:
        values = [f"{line['figures'][figure]:,.3g}" if figure in line["figures"] else "" for line in lines.values()]
        rows.append(f"| `{figure}` | {' | '.join(values)} |")
    return "\n".join(["", *made, "", *rows])


def main() -> dict[str, float]:
    """For `make bench`, which measures none of this: the list of parts."""
    command([])
    return {}


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
