"""What the two agents of examples/ learn, from their demonstrations to held-out tasks, for several seeds.

`--run` makes the runs that the results lack, each as the pages tell it: data, `agentloop sft`, `agentloop train`.
`--report` writes the tables of docs/sql-agent.md and docs/coding-agent.md. Without either: the gains so far.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._replay_figures import with_tables
from benchmarks._trained import ROOT, read, run, typed

RESULTS = ROOT / "docs" / "evidence" / "two_agents.jsonl"
AGENTS = ("sql_agent", "coding_agent")
SEEDS = range(5)
Result = dict[str, Any]


def learn(agent: str, seed: int, folder: Path) -> Result:
    """Held-out success of the warmed-up and of the trained model, and what it took; all files are in `folder`."""
    began = time.monotonic()
    (folder / "examples").symlink_to(ROOT / "examples")
    _, cpu = typed(f"examples.{agent}.make_data", "--seed", seed, folder=folder)
    start, more = run("sft", f"examples/{agent}/sft.yaml", {"run.seed": seed}, folder=folder)
    settings = {"run.seed": seed, "model.path": start["model"]}
    trained, most = run("train", f"examples/{agent}/train.yaml", settings, folder=folder)
    return {
        "agent": agent,
        "seed": seed,
        "before": trained["success_before"],
        "after": trained["success_after"],
        "cpu_s": round(cpu + more + most),
        "wall_s": round(time.monotonic() - began),
    }


def table(results: Sequence[Result]) -> str:
    """One agent's seeds as markdown."""
    head = "| seed | held-out success before | after | points | CPU-minutes |\n|---|---|---|---|---|\n"
    return head + "".join(
        f"| {row['seed']} | {row['before']:.1%} | {row['after']:.1%} | {100 * (row['after'] - row['before']):+.1f} "
        f"| {row['cpu_s'] / 60:.0f} |\n".replace("%", " %")
        for row in sorted(results, key=lambda row: row["seed"])
    )


def page(agent: str) -> Path:
    return ROOT / "docs" / f"{agent.replace('_', '-')}.md"


def main(arguments: Sequence[str] = ()) -> dict[str, float]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_agents", description=__doc__)
    parser.add_argument("--run", action="store_true", help="the runs that the results lack: minutes each")
    parser.add_argument("--report", action="store_true", help="the tables of the two pages")
    parser.add_argument("--agents", nargs="*", choices=AGENTS, default=list(AGENTS))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    given = parser.parse_args(arguments)
    made = {(row["agent"], row["seed"]) for row in read(RESULTS)}
    wanted = [(agent, seed) for seed in given.seeds for agent in given.agents if (agent, seed) not in made]
    for agent, seed in wanted if given.run else ():
        with tempfile.TemporaryDirectory() as folder:
            row = learn(agent, seed, Path(folder))
        print(f"{agent} seed {seed}: {row['before']:.1%} -> {row['after']:.1%}", flush=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
    results = read(RESULTS)
    for agent in AGENTS if given.report else ():
        found = {agent: table([row for row in results if row["agent"] == agent])}
        page(agent).write_text(with_tables(page(agent).read_text(encoding="utf-8"), found), encoding="utf-8")
    return {f"{row['agent']}_{row['seed']}_points": 100 * (row["after"] - row["before"]) for row in results}


if __name__ == "__main__":
    for name, value in main(sys.argv[1:]).items():
        print(f"{name:<40} {value:6.1f}")
