"""What replay does for a pretrained model: SmolLM2-135M on a family of tasks, against a control that was tuned.

`--run` makes the runs that the results lack, in parts of `--minutes`, one JSON line each once it has come to its end:
as many fresh episodes as all have. It goes on where it was stopped; seconds of a part that was stopped are not counted.
Without it: what was measured. `make real-model` comes first. A family's control is tuned before its arms are
compared: `--arms tune_2_2e-05 ...`, on seeds from 100.
"""

import argparse
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import _trained
from benchmarks._families import FAMILIES, Family
from benchmarks._replay_figures import Columns, Result, costs_table, differences_table, mean_success, to_target
from benchmarks._trained import ROOT, read

TASK = ROOT / "examples" / "calculator_agent"
LEVEL, NEWEST, FIRST, BUDGET = 0.5, 256, 512, 768
"""A run has reached the level once so many newest fresh episodes, all of new problems, succeed as often. Success of its
first so many is shown, too. Every run has so many in all: held-out success is that of policies that trained as long."""
COLUMNS = ("fresh", "replayed", "success", "tokens", "steps", "cpu", "wall")
TO_LEVEL = {
    "fresh to 50 %": "fresh",
    "generated tokens": "tokens",
    "rows, fresh and replayed": "fresh+replayed",
    "steps": "steps",
}
"""Seconds are in the results, but other programs ran at the same time: they are no figures."""
TUNED = [(epochs, rate) for epochs in (1, 2) for rate in (1e-5, 2e-5, 4e-5)]
ARMS: Mapping[str, Mapping[str, Any]] = {
    "on_policy": {"replay.fraction": 0.0},
    "on_policy_3": {"replay.fraction": 0.0, "batch.ppo_epochs": 3},
    "replay_instead": {"replay.fraction": 0.25},
    "replay_on_top": {
        "batch.trajectories": 48,
        "batch.mini_batch": 12,
        "replay.fraction": 1 / 3,
        "replay.shortfall": "shrink",
    },
    "state_values": {"replay.fraction": 0.0, "advantage.credit": "state"},
    "hindsight": {
        "batch.trajectories": 64,
        "batch.mini_batch": 16,
        "replay.fraction": 0.5,
        "replay.sources": {"hindsight": 1.0},
        "replay.sampler": "uniform",
        "replay.shortfall": "shrink",
        "replay.hindsight.enable": True,
    },
    **{f"tune_{epochs}_{rate:g}": {"replay.fraction": 0.0} for epochs, rate in TUNED},
}
TITLES = {
    "on_policy": "on-policy, tuned",
    "on_policy_3": "on-policy, 3 epochs: as many passes of rows as a third on top",
    "replay_instead": "a quarter replayed instead of fresh",
    "replay_on_top": "a third replayed on top",
    "state_values": "on-policy, with state values",
    "hindsight": "hindsight",
}
_FACTS = """
    select t.iteration, count(*), avg(t.success), sum(t.num_action_tokens),
        (select optimizer_steps from iterations i where i.run = t.run and i.iteration = t.iteration),
        (select value from metrics m where m.run = t.run and m.iteration = t.iteration and name = 'batch/replay'),
        (select value from metrics m where m.run = t.run and m.iteration = t.iteration and name = 'time/iteration')
    from trajectories t where source = 'self' and state <> 'orphaned' group by t.iteration order by t.iteration
"""


def settings(family: Family, arm: str, seed: int, data: Path) -> dict[str, Any]:
    tuned = tuple(map(float, arm.split("_")[1:])) if arm.startswith("tune") else family.found
    if tuned is None:
        raise SystemExit("The control must be tuned before arms are compared. Run --arms tune_..., and write `found`.")
    epochs, rate = tuned
    fresh = 24 if arm == "replay_instead" else 32
    return {
        "run.seed": seed,
        "run.iterations": -(-BUDGET // fresh),
        "environment.name": family.environment,
        "tasks.data": f"{data}/{{split}}.jsonl",
        "context.max_tokens": family.max_tokens,
        "batch.ppo_epochs": int(epochs),
        "optimizer.learning_rate": rate,
        "evaluation.every": 0,
        "evaluation.tasks": 1,
        "checkpoint.every": 8,
        "checkpoint.keep": 1,
        "checkpoint.keep_policies": "none",
        "compute.autocast": "bfloat16",
        **family.of_data(data),
        **ARMS[arm],
    }


def start_model(family: Family, seed: int, folder: Path) -> Path:
    """Supervised on this seed's demonstrations."""
    data, made = folder / f"data-{seed}", folder / f"start-{seed}"
    if not made.exists():
        _trained.typed(family.module, data, "--seed", seed, *family.words, folder=ROOT)
        place = {"run.folder": str(folder / "sft"), "sft.data": str(data / "demonstrations.jsonl")}
        given = {"context.max_tokens": family.max_tokens, "run.seed": seed, "compute.autocast": "bfloat16"}
        result, _ = _trained.run("sft", str(TASK / "sft.yaml"), place | given)
        (Path(result["folder"]) / "model").rename(made)
    return made


def facts(run: Path) -> list[tuple[Any, ...]]:
    """A row per iteration that was trained on."""
    if not (run / "replay.sqlite").exists():
        return []
    with closing(sqlite3.connect(f"file:{run / 'replay.sqlite'}?mode=ro", uri=True, timeout=60)) as database:
        begun = database.execute("select 1 from sqlite_master where name = 'trajectories'").fetchone()
        return [row for row in database.execute(_FACTS) if row[-1] is not None] if begun else []


def newest_success(rows: Sequence[tuple[Any, ...]]) -> float:
    """Of the newest fresh episodes; 0 before there are as many."""
    count, won = 0, 0.0
    for _, fresh, success, *_ in reversed(rows):
        count, won = count + fresh, won + fresh * success
        if count >= NEWEST:
            return float(won / count)
    return 0.0


def reached(rows: Sequence[tuple[Any, ...]]) -> int | None:
    """The first iteration, from 1, after which the level was there."""
    return next((made for made in range(1, len(rows) + 1) if newest_success(rows[:made]) >= LEVEL), None)


def is_done(rows: Sequence[tuple[Any, ...]], arm: str) -> bool:
    """Runs that only tune end with their first episodes."""
    fresh: int = sum(row[1] for row in rows)
    return fresh >= (BUDGET if arm in TITLES else FIRST)


def part(run: Path, family: Family, arm: str, seed: int, minutes: float) -> tuple[float, bool]:
    """Train on for so long at most; CPU-seconds, and whether the run has come to its end."""
    if is_done(facts(run), arm):  # it was stopped before its result was written
        return 0.0, True
    folder = run.parent
    given = settings(family, arm, seed, folder / f"data-{seed}")
    given |= {"model.path": str(start_model(family, seed, folder))}
    sets = [word for key, value in given.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    going_on = any((run / "checkpoints").glob("*"))
    words = [str(run), "--resume"] if going_on else [str(TASK / "train.yaml"), "--run", str(run), *sets]
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    before, ends = _trained.children_cpu(), time.monotonic() + 60 * minutes
    with (folder / f"{run.name}.log").open("a") as log:
        training = subprocess.Popen(
            [sys.executable, "-m", "agentloop", "train", *words],
            cwd=ROOT,
            env={**os.environ, **quiet},
            stdout=log,
            stderr=log,
        )
        while training.poll() is None:
            if is_done(facts(run), arm) or time.monotonic() > ends:
                training.send_signal(signal.SIGINT)  # it ends with a checkpoint, after this iteration
                training.wait()
            time.sleep(2)
    done = is_done(facts(run), arm)
    if training.returncode not in (0, 130) and not done:
        raise RuntimeError(f"{run.name} must end well, got {training.returncode}: see {folder / run.name}.log.")
    return _trained.children_cpu() - before, done


def result_of(run: Path, arm: str, seed: int, cpu: float) -> Result:
    """Its costs by iteration, and of an arm held-out success at the end, on kinds of problems that it never saw."""
    rows = facts(run)
    wall = sum(row[-1] for row in rows)
    iterations = [
        [fresh, replayed, success, tokens, steps, round(cpu * seconds / wall, 1), round(seconds, 1)]
        for _, fresh, success, tokens, steps, replayed, seconds in rows
    ]
    facts_of = {"arm": arm, "seed": seed, "columns": COLUMNS, "iterations": iterations, "reached": reached(rows)}
    if arm not in TITLES:
        return facts_of
    printed, _ = _trained.typed("agentloop", "evaluate", run, "--tasks", 256, "--json", folder=ROOT)
    return {**facts_of, "held_out": json.loads(printed)["success"]}


SHOWN = Columns(
    TO_LEVEL,
    {
        f"success of the first {FIRST}": partial(mean_success, episodes=FIRST),
        "held-out success": lambda result: float(result["held_out"]),
    },
)


def results_of(family: str) -> Path:
    return ROOT / "docs" / "evidence" / f"pretrained_{family}.jsonl"


def tables(family: str) -> dict[str, str]:
    """Costs of each arm, and differences from the control seed by seed."""
    results = read(results_of(family))
    runs = {arm: [each for each in results if each["arm"] == arm and each["seed"] < 100] for arm in TITLES}
    runs = {arm: each for arm, each in runs.items() if each}
    pairs = [(arm, "on_policy") for arm in runs if arm != "on_policy"]
    pairs += [(arm, "on_policy_3") for arm in ("replay_instead", "replay_on_top")]
    return {
        family: costs_table(runs, TITLES, SHOWN),
        f"{family}-against": differences_table(runs, TITLES, pairs, SHOWN),
    }


def main(arguments: Sequence[str] = ()) -> dict[str, float]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pretrained", description=__doc__)
    parser.add_argument("--run", action="store_true", help="the runs that the results lack: 12 to 35 CPU-minutes each")
    parser.add_argument("--family", choices=list(FAMILIES), default="calculator")
    parser.add_argument("--arms", nargs="*", choices=list(ARMS))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(range(5)))
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "pretrained")
    parser.add_argument("--minutes", type=float, default=8.0, help="of a part, after which a checkpoint is made")
    given = parser.parse_args(arguments)
    family, results, folder = FAMILIES[given.family], results_of(given.family), given.folder / given.family
    arms = given.arms or [arm for arm in TITLES if arm not in family.without]
    folder.mkdir(parents=True, exist_ok=True)
    made = {(each["arm"], each["seed"]) for each in read(results)}
    for seed, arm in [(seed, arm) for seed in given.seeds for arm in arms] if given.run else ():
        run, used = folder / f"{arm}-{seed}", folder / f"{arm}-{seed}.cpu"
        while (arm, seed) not in made:
            cpu, done = part(run, family, arm, seed, given.minutes)
            cpu += float(used.read_text()) if used.exists() else 0.0
            used.write_text(str(cpu))
            if done:
                result = result_of(run, arm, seed, cpu)
                with results.open("a") as file:
                    file.write(json.dumps(result) + "\n")
                print(f"{arm} seed {seed}: {cpu:.0f} CPU-s, {mean_success(result, FIRST):.1%}", flush=True)
                made.add((arm, seed))
    return {f"{each['arm']}_{each['seed']}_fresh": to_target(each, "fresh") for each in read(results)}


if __name__ == "__main__":
    for name, value in main(sys.argv[1:]).items():
        print(f"{name:<40} {value:10,.0f}")
