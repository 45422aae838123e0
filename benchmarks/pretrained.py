"""What replay does for a pretrained model: SmolLM2-135M on a family of tasks, against a control that was tuned.

`--run` makes the runs that the results lack, in parts of `--minutes`, one JSON line each once it has come to its end.
It goes on where it was stopped; seconds of a part that was stopped are not counted. Without it: what was measured.
`make real-model` comes first; the families of others need their packages (docs/benchmarks-of-others.md). A family's
control is tuned before its arms are compared: `--arms tune_2_2e-05 ...`, on seeds from 100.
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
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import _trained
from benchmarks._families import FAMILIES, Family, Settings
from benchmarks._pretrained_tables import COLUMNS, TITLES, results_of
from benchmarks._replay_figures import Result, mean_success, to_target
from benchmarks._trained import ROOT, read

NEWEST, BUDGET = 256, 768
"""Fresh episodes whose success is compared with the level, and most of a run."""
TUNED = [(epochs, rate) for epochs in (1, 2, 3) for rate in (1e-5, 2e-5, 4e-5, 8e-5)]
ARMS: Mapping[str, Settings] = {
    "on_policy": {},
    "on_policy_3": {"batch.ppo_epochs": 3},
    "replay_instead": {"replay.fraction": 0.25},
    "replay_on_top": {
        "batch.trajectories": 48,
        "batch.mini_batch": 12,
        "replay.fraction": 1 / 3,
        "replay.shortfall": "shrink",
    },
    **{f"tune_{epochs}_{rate:g}": {} for epochs, rate in TUNED},
}
_FACTS = """
    with named as (
        select iteration, max(case when name = 'batch/replay' then value end) as replayed,
            round(max(case when name = 'time/collect' then value end), 1) as collected,
            round(max(case when name = 'time/update' then value end), 1) as updated,
            round(max(case when name = 'time/iteration' then value end), 1) as wall
        from metrics group by iteration
    )
    select count(*), replayed, avg(t.reward >= 1), sum(t.num_action_tokens),
        (select optimizer_steps from iterations i where i.run = t.run and i.iteration = t.iteration),
        wall, sum(t.num_turns), collected, updated, sum(t.advantage <> 0)
    from trajectories t join named using (iteration)
    where source = 'self' and state <> 'orphaned' and wall is not null group by t.iteration order by t.iteration
"""


class Iteration(NamedTuple):
    """What one of a run took, as far as the run itself knows."""

    fresh: int
    replayed: float
    success: float
    tokens: int
    steps: int
    wall: float
    turns: int
    collect: float
    update: float
    with_signal: int


def settings(family: Family, arm: str, seed: int, data: Path) -> dict[str, Any]:
    epochs, rate = map(float, arm.split("_")[1:]) if arm.startswith("tune") else family.found
    fresh = 24 if ARMS[arm].get("replay.fraction") == 0.25 else 32
    return {
        "run.seed": seed,
        "run.iterations": -(-BUDGET // fresh),
        "tasks.data": f"{data}/{{split}}.jsonl",
        "replay.fraction": 0.0,
        "batch.ppo_epochs": int(epochs),
        "optimizer.learning_rate": rate,
        "evaluation.every": 0,
        "evaluation.tasks": 1,
        "checkpoint.every": 8,
        "checkpoint.keep": 1,
        "checkpoint.keep_policies": "none",
        "compute.autocast": family.autocast,
        **family.training,
        **ARMS[arm],
    }


def start_model(family: Family, seed: int, folder: Path) -> Path:
    """Supervised on this seed's demonstrations."""
    data, made = folder / f"data-{seed}", folder / f"start-{seed}"
    if not made.exists():
        for command in family.data(data, seed):
            _trained.typed(*command, folder=ROOT)
        place: Settings = {"run.folder": str(folder / "sft"), "sft.data": str(data / "demonstrations.jsonl")}
        result, _ = _trained.run("sft", family.sft, {**place, "compute.autocast": family.autocast, "run.seed": seed})
        (Path(result["folder"]) / "model").rename(made)
    return made


def facts(run: Path) -> list[Iteration]:
    """Iterations that were trained on."""
    if not (run / "replay.sqlite").exists():
        return []
    with closing(sqlite3.connect(f"file:{run / 'replay.sqlite'}?mode=ro", uri=True, timeout=60)) as database:
        begun = database.execute("select 1 from sqlite_master where name = 'trajectories'").fetchone()
        return [Iteration(*row) for row in database.execute(_FACTS)] if begun else []


def newest_success(made: Sequence[Iteration]) -> float:
    """Of the newest fresh episodes; 0 before there are as many."""
    count, won = 0, 0.0
    for each in reversed(made):
        count, won = count + each.fresh, won + each.fresh * each.success
        if count >= NEWEST:
            return float(won / count)
    return 0.0


def reached(made: Sequence[Iteration], level: float) -> int | None:
    """The first iteration, from 1, after which the level was there."""
    return next((last for last in range(1, len(made) + 1) if newest_success(made[:last]) >= level), None)


def is_done(made: Sequence[Iteration], family: Family, arm: str) -> bool:
    fresh = sum(each.fresh for each in made)
    if arm not in TITLES:
        return fresh >= family.first
    over = family.ends_at_level and reached(made, family.level) is not None
    return fresh >= BUDGET or (fresh >= family.first and over)


def part(run: Path, family: Family, arm: str, seed: int, minutes: float) -> tuple[float, bool]:
    """Train on for so long at most; CPU-seconds, and whether the run has come to its end."""
    if is_done(facts(run), family, arm):  # it was stopped before its result was written
        return 0.0, True
    folder = run.parent
    given = settings(family, arm, seed, folder / f"data-{seed}")
    given |= {"model.path": str(start_model(family, seed, folder))}
    sets = [word for key, value in given.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    going_on = any((run / "checkpoints").glob("*"))
    words = [str(run), "--resume"] if going_on else [family.train, "--run", str(run), *sets]
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
            if is_done(facts(run), family, arm) or time.monotonic() > ends:
                training.send_signal(signal.SIGINT)  # it ends with a checkpoint, after this iteration
                training.wait()
            time.sleep(2)
    done = is_done(facts(run), family, arm)
    if training.returncode not in (0, 130) and not done:
        raise RuntimeError(f"{run.name} must end well, got {training.returncode}: see {folder / run.name}.log.")
    return _trained.children_cpu() - before, done


def result_of(run: Path, family: Family, arm: str, seed: int, cpu: float) -> Result:
    """Its costs by iteration. A family whose runs are equally long has held-out success of each arm's policy."""
    made = facts(run)
    wall = sum(each.wall for each in made)
    result = {
        "arm": arm,
        "seed": seed,
        "commit": _trained.commit(),
        "autocast": family.autocast,
        "columns": COLUMNS,
        "iterations": [[*each[:5], round(cpu * each.wall / wall, 1), *each[5:]] for each in made],
        "reached": reached(made, family.level),
    }
    if arm not in TITLES or family.ends_at_level:
        return result
    printed, _ = _trained.typed("agentloop", "evaluate", run, "--tasks", 256, "--json", folder=ROOT)
    return {**result, "held_out": json.loads(printed)["success"]}


def main(arguments: Sequence[str] = ()) -> dict[str, float]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pretrained", description=__doc__)
    parser.add_argument("--run", action="store_true", help="the runs that the results lack: 12 to 35 CPU-minutes each")
    parser.add_argument("--family", choices=list(FAMILIES), default="calculator")
    parser.add_argument("--arms", nargs="*", choices=list(ARMS))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(range(5)))
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "pretrained")
    parser.add_argument("--minutes", type=float, default=8.0, help="of a part, after which a checkpoint is made")
    parser.add_argument("--autocast", choices=["bfloat16", "none"], default="bfloat16", help="none: float32 alone")
    given = parser.parse_args(arguments)
    family = FAMILIES[given.family]._replace(autocast=given.autocast)
    results, folder = results_of(given.family), given.folder / given.family
    arms = given.arms or [arm for arm in ARMS if arm in TITLES]
    folder.mkdir(parents=True, exist_ok=True)
    made = {(each["arm"], each["seed"]) for each in read(results)}
    for seed, arm in [(seed, arm) for seed in given.seeds for arm in arms] if given.run else ():
        run, used = folder / f"{arm}-{seed}", folder / f"{arm}-{seed}.cpu"
        while (arm, seed) not in made:
            cpu, done = part(run, family, arm, seed, given.minutes)
            cpu += float(used.read_text()) if used.exists() else 0.0
            used.write_text(str(cpu))
            if done:
                result = result_of(run, family, arm, seed, cpu)
                with results.open("a") as file:
                    file.write(json.dumps(result) + "\n")
                print(f"{arm} seed {seed}: {cpu:.0f} CPU-s, {mean_success(result, family.first):.1%}", flush=True)
                made.add((arm, seed))
    return {f"{each['arm']}_{each['seed']}_fresh": to_target(each, "fresh") for each in read(results)}


if __name__ == "__main__":
    for name, value in main(sys.argv[1:]).items():
        print(f"{name:<40} {value:10,.0f}")
