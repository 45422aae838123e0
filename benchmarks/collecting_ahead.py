"""What does it bring to collect ahead of the learner, where tools are slow?

The quickstart's environment, whose tools wait 50 or 200 ms, is collected by two workers from one engine. In each round
every way makes a run from the same model, one after the other: what slows the machine slows all of them.
Without options: one round of K = 0 and K = 1 at 200 ms, on the tests' server, which samples one request after another.
With `--vllm`, one vLLM on this machine's CPU samples for all runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from agentloop.config import RunConfig
from agentloop.engines.publish.engine_control import EngineControl
from agentloop.engines.serving.engine_process import EngineProcess
from agentloop.engines.serving.vllm_command import ServeOptions, serve_command, serve_environment
from benchmarks._goals import show
from benchmarks._replay_arms import TARGET
from benchmarks._replay_runs import ROOT, configuration, starting_point
from tests.fakes.run_roles import ENGINE_ROLE, LEARNER, Roles, running_roles
from tests.fakes.runs import buffer_of, rows
from tests.vllm.server import KEY, SMALL, SMALL_MACHINE, beside_a_learner, free_port

WAYS: Mapping[str, Mapping[str, object]] = {
    "K0": {"collection.max_staleness": 0},
    "K1": {"collection.max_staleness": 1},
    "K2_replay": {"collection.max_staleness": 2, "collection.samples_per_insert": 2.0},
}
GOALS = {"speedup_of_K1_at_200_ms": ">= 1.3"}
WORK = ROOT / "runs" / "collecting_ahead"
_SIZES = {"batch.trajectories": 64, "batch.mini_batch": 32, "replay.fraction": 0.25, "loss.fresh.anchor": "behavior"}
_WORKERS = ("worker-1", "worker-2")
_LIMIT_S, _MAX_TOKENS = 1800, 2048
MODEL_SEED = 0
"""All runs begin with one model; their tasks and samples differ by the run's seed."""


class AttachedRoles(Roles):
    """A server that others started and end; the learner publishes to it."""

    def __init__(self, folder: Path, config: RunConfig, engine: EngineProcess, port: int) -> None:
        super().__init__(folder, config)
        path = folder / "config.yaml"
        path.write_text(path.read_text().replace(f":{self.port}", f":{port}"))
        self.engine = engine


@dataclass(frozen=True)
class Served:
    """One vLLM for all runs."""

    process: EngineProcess
    port: int


@contextmanager
def served(vllm: Path, model: Path, log: Path) -> Iterator[Served]:
    port = free_port()
    chosen = ServeOptions(str(model), "policy", port, "float32", _MAX_TOKENS, further=SMALL)
    os.environ["AGENTLOOP_ENGINE_KEY"] = KEY
    environment = serve_environment(chosen, KEY, {**os.environ, **SMALL_MACHINE})
    process = EngineProcess(serve_command(beside_a_learner(vllm, log.parent), chosen), environment, port=port, log=log)
    try:
        with EngineControl(chosen.url, model="policy", key=KEY) as control:
            process.wait_until(control.healthy, limit_s=_LIMIT_S, stopped=lambda: False)
        yield Served(process, port)
    finally:
        process.end()


@dataclass(frozen=True)
class Outcome:
    """One run, from the end of its first iteration to the end of its last."""

    way: str
    delay_ms: int
    seed: int
    iterations: int
    without_fresh_rows: int
    """Of these, updates from replayed rows alone."""
    seconds: float
    waited_s: float
    """The learner, for episodes."""
    updated_s: float
    cpu_s: Mapping[str, float]
    """By role."""
    to_target_s: float | None
    """From the first iteration's end until held-out success was at the target; None: it never was."""
    success: float
    """At the end."""
    late: int
    unused: int

    @property
    def per_minute(self) -> float:
        return 60 * self.iterations / self.seconds

    @property
    def cores(self) -> float:
        return sum(self.cpu_s.values()) / self.seconds


def run_once(
    way: str, delay_ms: int, seed: int, *, iterations: int, evaluate: bool, work: Path, engine: Served | None
) -> Outcome:
    """A run of all its roles; evaluations count as a part of its time."""
    model = starting_point("dense", MODEL_SEED, work)
    settings = {
        **_SIZES,
        **WAYS[way],
        "model.path": str(model),
        "run.iterations": iterations,
        "environment.options.delay_s": delay_ms / 1000,
        "evaluation.every": 4 if evaluate else 0,
        "evaluation.tasks": 128 if evaluate else 8,
        "run.stop_at_success": TARGET if evaluate else None,
        "context.max_tokens": _MAX_TOKENS // 2,
        "rollout.engine": "vllm",
        "engine.urls": ["http://127.0.0.1:1"],
        "collection.by": "workers",
    }
    folder = Path(tempfile.mkdtemp(prefix=f"{way}-{delay_ms}-{seed}-", dir=work))
    config = configuration(settings, seed=seed, folder=folder)
    roles = Roles(folder, config) if engine is None else AttachedRoles(folder, config, engine.process, engine.port)
    names = [LEARNER, *_WORKERS]
    try:
        with running_roles(roles, names if engine is not None else [ENGINE_ROLE, *names]):
            return _watched(roles, way, delay_ms, seed)
    finally:
        shutil.rmtree(folder)


def _watched(roles: Roles, way: str, delay_ms: int, seed: int) -> Outcome:
    began, first, last, to_target = 0.0, 0, 0, None
    cpu: dict[str, float] = {}
    spent: dict[str, float] = {}
    ended = 0.0
    limit = time.monotonic() + _LIMIT_S
    while roles.is_running(LEARNER):
        assert time.monotonic() < limit, roles.printed(LEARNER)[-2000:]
        time.sleep(0.2)
        if not first and roles.look() is None:
            continue
        done = _iterations(roles)
        if done and not first:
            began, first, cpu = time.monotonic(), done, _cpu_seconds(roles)
        if done > last and first:
            last, ended, spent = done, time.monotonic(), _cpu_seconds(roles)
        if first and to_target is None and _best(roles) >= TARGET:
            to_target = time.monotonic() - began
    assert roles.processes[LEARNER].returncode == 0, roles.printed(LEARNER)[-3000:]
    database = buffer_of(roles.run)
    seconds = rows(database, "select iteration, value, name from metrics where name in ('time/collect', 'time/update')")
    waited, updated = (
        sum(value for iteration, value, metric in seconds if metric == name and first < iteration <= last)
        for name in ("time/collect", "time/update")
    )
    sizes = rows(database, "select iteration, fresh from iterations")
    success = rows(database, "select value from metrics where name = 'eval/success' order by iteration")[-1][0]
    counts = roles.look()
    assert counts is not None
    return Outcome(
        way=way,
        delay_ms=delay_ms,
        seed=seed,
        iterations=last - first,
        without_fresh_rows=sum(fresh == 0 and first < iteration <= last for iteration, fresh in sizes),
        seconds=ended - began,
        waited_s=waited,
        updated_s=updated,
        cpu_s={role: spent[role] - cpu[role] for role in cpu},
        to_target_s=to_target,
        success=success,
        late=counts.late,
        unused=counts.unused,
    )


def _iterations(roles: Roles) -> int:
    """How many have ended."""
    return int(rows(buffer_of(roles.run), "select count(*) from metrics where name = 'time/iteration'")[0][0])


def _best(roles: Roles) -> float:
    """The highest held-out success after the first iteration."""
    found = rows(buffer_of(roles.run), "select max(value) from metrics where name = 'eval/success' and iteration > 0")
    return float(found[0][0] or 0.0)


def _cpu_seconds(roles: Roles) -> dict[str, float]:
    """Of each role, with the processes that it started."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(") ")[2].split()
            parents[int(path.parent.name)], ticks[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:13]))
    role_of = {process.pid: role for role, process in roles.processes.items()}
    if isinstance(roles, AttachedRoles):
        role_of[roles.engine.pid] = ENGINE_ROLE
    found = dict.fromkeys(role_of.values(), 0.0)
    for pid, own in ticks.items():
        at = pid
        while at not in role_of and at in parents:
            at = parents[at]
        if at in role_of:
            found[role_of[at]] += own / os.sysconf("SC_CLK_TCK")
    return found


def shown(outcome: Outcome) -> str:
    cpu = ", ".join(f"{role} {seconds:.0f}" for role, seconds in outcome.cpu_s.items())
    target = "not reached" if outcome.to_target_s is None else f"{outcome.to_target_s:.0f} s"
    return (
        f"{outcome.way:<10} {outcome.delay_ms} ms, seed {outcome.seed}: {outcome.per_minute:.2f} iterations a minute "
        f"({outcome.iterations}, {outcome.without_fresh_rows} of replay alone, in {outcome.seconds:.0f} s), waited "
        f"{outcome.waited_s:.0f} s, updated {outcome.updated_s:.0f} s, {outcome.cores:.2f} cores ({cpu} CPU-s), "
        f"{TARGET:.0%}: {target}, success {outcome.success:.1%}, late {outcome.late}, unused {outcome.unused}"
    )


def figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Medians over the rounds of what each way does beside K = 0 of the same round."""
    found: dict[str, float] = {}
    by_place = {(each.way, each.delay_ms, each.seed): each for each in outcomes}
    for delay_ms in sorted({each.delay_ms for each in outcomes}):
        for way in WAYS:
            mine = [each for each in outcomes if (each.way, each.delay_ms) == (way, delay_ms)]
            if not mine:
                continue
            place = f"{way}_at_{delay_ms}_ms"
            found[f"iterations_a_minute_of_{place}"] = median(each.per_minute for each in mine)
            found[f"cores_of_{place}"] = median(each.cores for each in mine)
            pairs = [(each, by_place.get(("K0", delay_ms, each.seed))) for each in mine if way != "K0"]
            ratios = [each.per_minute / base.per_minute for each, base in pairs if base is not None]
            found |= {f"speedup_of_{place}": median(ratios)} if ratios else {}
    return found


def _rounds(given: argparse.Namespace, engine: Served | None) -> list[Outcome]:
    outcomes = []
    for number, seed in enumerate(given.seeds):
        for delay_ms in given.delays:
            # Who is first in one round is last in the next.
            for way in given.ways if number % 2 == 0 else given.ways[::-1]:
                size = {"iterations": given.iterations, "evaluate": given.to_target}
                outcomes.append(run_once(way, delay_ms, seed, **size, work=given.work, engine=engine))
                print(shown(outcomes[-1]), flush=True)
                if given.results is not None:
                    with given.results.open("a") as file:
                        file.write(json.dumps(asdict(outcomes[-1])) + "\n")
    return outcomes


def main(arguments: Sequence[str] = ()) -> dict[str, float]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collecting_ahead", description=__doc__)
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=["K0", "K1"])
    parser.add_argument("--delays", nargs="*", type=int, default=[200], help="milliseconds of a tool call")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--iterations", type=int, default=10, help="of each run, at most")
    parser.add_argument("--to-target", action="store_true", help="evaluate, and end a run that is at the target")
    parser.add_argument("--vllm", type=Path, help="vLLM's executable, which samples in place of the tests' server")
    parser.add_argument("--results", type=Path, help="a file to which each run is added, as a line of JSON")
    parser.add_argument("--work", type=Path, default=WORK, help="for warmed-up models and runs in progress")
    given = parser.parse_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    if given.vllm is None:
        outcomes = _rounds(given, None)
    else:
        with served(given.vllm, starting_point("dense", MODEL_SEED, given.work), given.work / "vllm.log") as engine:
            outcomes = _rounds(given, engine)
    found = figures(outcomes)
    show(found, GOALS)
    return found


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
