"""A run for pages to show, trained for real in a few seconds: replay over several iterations, tool calls and their
errors, several segments, replies that were cut off, tasks tried again; some of it scored by the newest policy. A second
run stands in the same database.
"""

from dataclasses import replace
from pathlib import Path

from typer.testing import CliRunner

from agentloop.cli.main import app
from agentloop.training.train import train
from replay import ReplayStore
from replay.storage.collecting.ticket_records import TicketRecord
from tests.fakes.records import a_run, fresh_draws, group, iteration_record, measured, policy, trajectory
from tests.fakes.runs import SilentDisplay, rows, save_qwen2, small_config

NAME = "demonstration"
OTHER = "another-run"
ITERATIONS = 6
_SURVEYING = Path(__file__).with_name("surveying.py")
_WINDOW = {"strategy": "sliding_window", "options": {"budget": 330}}


def record(folder: Path) -> Path:
    """The run folder."""
    config = small_config(
        folder / "runs",
        save_qwen2(folder / "model", layers=2),
        run={"name": NAME, "iterations": ITERATIONS},
        environment={"name": f"{_SURVEYING}:Surveying"},
        context={"parser": f"{_SURVEYING}:Eager", "max_tokens": 700, **_WINDOW},
        rollout={"max_turns": 5, "max_tokens_per_turn": 24},
        replay={"fraction": 0.5, "sampler": "difficulty"},
        evaluation={"every": 3},
        checkpoint={"every": 3},
    )
    train(config, display=SilentDisplay())
    run = folder / "runs" / f"{NAME}-001"
    scored = CliRunner().invoke(app, ["replay", "rescore", str(run), "--where", "staleness<4"])
    assert scored.exit_code == 0, scored.output
    _add_another_run(run / "replay.sqlite")
    return run


def _add_another_run(database: Path) -> None:
    """Two iterations with the metrics of the first run's, each moved a little."""
    (task,) = rows(database, "select hash from tasks order by hash limit 1")[0]
    store = ReplayStore.open(database)
    store.add_run(replace(a_run(OTHER), name=OTHER))
    store.add_policy(policy(0, run=OTHER))
    for iteration in (1, 2):
        add_iteration(store, database, iteration, task=task)
    _add_workers(store, task)
    store.close()


def _add_workers(store: ReplayStore, task: str) -> None:
    """Two workers collect for an engine and a learner that waits."""
    store.roles.lead(OTHER, "learner-1", lease_s=86400.0)
    for number in range(2):
        facts = {"host": f"node-{number}", "pid": 4000 + number, "concurrency": 32, "in_flight": 2, "state": "working"}
        store.roles.report("worker", OTHER, f"worker-{number}", {**facts, "done": 2, "failed": 0, "tool_errors": 1})
    serving = {"version": 2, "label": "another-run@2-1a2b3c4d", "state": "serving", "difference": 1.5e-5}
    store.roles.report("engine", OTHER, "http://node-0:8801", serving)
    store.tickets.issue([], [TicketRecord(OTHER, 0, 0, task, 3)])
    store.tickets.fail(store.tickets.claim(OTHER, "worker-0", count=1, lease_s=86400.0), "the engine gave no reply")


def add_iteration(store: ReplayStore, database: Path, iteration: int, *, run: str = OTHER, task: str) -> None:
    """What a trainer writes when an update is done."""
    place = {"run": run, "iteration": iteration}
    collected = group(f"{run}-{iteration}", task=task, **place)
    fresh = [
        trajectory(f"{run}-{iteration}-{member}", group=collected.id, task=task, member=member, slot=member,
                   success=member == 0, reward=float(member == 0), **place)
        for member in range(2)
    ]  # fmt: skip
    store.append([], [collected], fresh)
    draws = fresh_draws(fresh, iteration=iteration)
    store.reserve_fresh(draws)
    metrics = rows(database, f"select name, value from metrics where iteration = {1 + (iteration - 1) % ITERATIONS}")
    known = {name: value * 1.1 for name, value in metrics if value is not None}
    done = iteration_record(iteration, replay=0, run=run, planned_fresh=2, planned_replay=0, fresh=2, metrics=known)
    store.commit(done, measured(draws), sampler_state={})
    store.add_policy(policy(iteration, run=run))
