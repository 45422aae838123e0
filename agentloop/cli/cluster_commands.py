"""`agentloop engine | worker | launch`: the programs of a run besides its learner, and what starts all of them."""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

import typer

from agentloop.cli.options import Resume, ResumingCommand, RunPlace, resume_of, saying
from agentloop.engines.publish.engine_control import EngineControl
from agentloop.engines.remote.ended_engine import noted_end
from agentloop.engines.serving.engine_process import EngineProcess
from agentloop.engines.serving.engine_watch import SILENT_S, EngineWatch
from agentloop.engines.serving.served_engine import EngineEnded
from agentloop.engines.serving.vllm_command import (
    KEY_VARIABLE,
    ServeOptions,
    find_vllm,
    serve_command,
    serve_environment,
)
from agentloop.errors import UserError
from agentloop.launch.role_commands import load_run_config, role_members
from agentloop.launch.roles_file import load_roles
from agentloop.launch.supervised_role import MARK
from agentloop.launch.supervision import launch_here
from agentloop.runs.run_folder import claim_run_folder, run_to_continue
from agentloop.runs.signals import end_at_once, graceful_stop
from agentloop.workers.joined_run import join_run
from agentloop.workers.worker import Worker

_LOOK_AGAIN_S = 0.5
app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    epilog="A key is read from AGENTLOOP_ENGINE_KEY. "
    "Example: agentloop engine Qwen/Qwen3-8B --run runs/search-001 -- --tensor-parallel-size 2",
)
def engine(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder or hub id that vLLM is started with.")
    ] = None,
    further: Annotated[
        list[str] | None, typer.Argument(metavar="[-- WORDS]", help="Passed on to vllm serve as they are.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Folder of the run whose newest policy it has to serve.")
    ] = None,
    attach: Annotated[
        str | None, typer.Option(metavar="URL", help="Start nothing: publish to the server at URL, and prove it.")
    ] = None,
    vllm: Annotated[
        Path | None, typer.Option(metavar="PATH", help="vLLM's executable; AGENTLOOP_VLLM, or the one on the PATH.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where it listens, on this machine only.")] = 8000,
    name: Annotated[str, typer.Option(help="What it calls the model.")] = "policy",
    dtype: Annotated[str, typer.Option(help="vLLM's numbers: auto, bfloat16, float32, ...")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a prompt and its reply; as the model allows if left out.")
    ] = None,
    lora_rank: Annotated[
        int, typer.Option(min=0, help="The run's lora.rank, when it trains adapters; 0: whole models are published.")
    ] = 0,
    wait: Annotated[float, typer.Option(min=0, help="Seconds that the run's folder may take to be there.")] = 600.0,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds that it may take to answer at first.")] = 1800.0,
    silence: Annotated[float, typer.Option(min=1, help="Seconds without an answer after which it ends.")] = SILENT_S,
) -> None:
    """Serve a run's policy with vLLM on this machine: started, watched, and always proved."""
    key, say, asked = os.environ.get(KEY_VARIABLE) or None, saying("engine"), list[int]()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(number))

    policies = None if run is None else _policies_of(run, wait_s=wait, stopped=lambda: bool(asked), say=say)
    if (model is None) == (attach is None):
        raise UserError(
            f"MODEL must be given, or --attach, but not both, got {model} and {attach}. "
            "Example: agentloop engine Qwen/Qwen3-8B --run runs/search-001"
        )
    options = ServeOptions(model or "", name, port, dtype, max_model_len, lora_rank, tuple(further or ()))
    with EngineControl(attach or options.url, model=name, key=key) as control:
        watch = EngineWatch(control, policies, say=say, stopped=lambda: bool(asked), silent_s=silence)
        if attach is not None:
            watch.stay(None)
            return
        folder = Path("runs") if run is None else run
        environment = serve_environment(options, key, os.environ)
        # A learner that waits is to give up where nobody starts this again.
        with nullcontext() if MARK in os.environ else noted_end(folder, port):
            command = serve_command(find_vllm(vllm, environment), options)
            log = folder / f"engine-{port}.log"
            say(f"starting {' '.join(command[:3])} (log: {log})")
            process = EngineProcess(command, environment, port=port, log=log)
            try:
                watch.serve(process, start_timeout_s=start_timeout)
            except EngineEnded as error:
                say(str(error))
                raise typer.Exit(1) from error
            finally:
                process.end()


def _policies_of(run: Path, *, wait_s: float, stopped: Callable[[], bool], say: Callable[[str], None]) -> Path:
    end = time.monotonic() + wait_s
    if wait_s and not run.is_dir():
        say(f"waits for the run at {run}")
    while not run.is_dir() and not stopped():
        if time.monotonic() >= end:
            raise UserError(
                f"--run must be the folder of a run, got {str(run)!r}, which is not there after {wait_s:g} s. "
                "Start the run first."
            )
        time.sleep(_LOOK_AGAIN_S)
    return run / "policies"


@app.command(epilog="Example: agentloop worker --run runs/search-001 --concurrency 64")
def worker(
    run: Annotated[Path, typer.Option(metavar="RUN", help="Folder of the run, which is waited for.")],
    concurrency: Annotated[int, typer.Option(min=1, help="Most episodes at once.")] = 32,
    wait: Annotated[float, typer.Option(min=0, help="Seconds for which the run may not be there yet.")] = 600.0,
) -> None:
    """Collect episodes for a run: claimed from its database, run on its engines, stored as they end."""
    say = saying("worker")
    with graceful_stop(say, working="leaving; again to end at once", idle="left") as stop:
        joined = join_run(run, wait_s=wait, note=say)
        say(f"collecting for {run}, {concurrency} episodes at once")
        with stop.working():
            Worker(joined, concurrency=concurrency, stop=stop, say=say).collect()
    sys.stdout.flush()
    sys.stderr.flush()
    end_at_once(stop.exit_code)  # a tool that never ends, or a database that never answers, is not waited for


@app.command(
    cls=ResumingCommand,
    epilog="Example: agentloop launch configs/cluster.yaml, or: agentloop launch configs/cluster.yaml --on ray",
)
def launch(
    file: Annotated[Path, typer.Argument(metavar="ROLES", help="YAML file of the roles: see configs/cluster.yaml.")],
    on: Annotated[Literal["local", "ray"], typer.Option(help="Where they are started.")] = "local",
    run: RunPlace = None,
    resume: Resume = None,
) -> None:
    """Start the roles of a run: learner, engines, workers, on this machine or on Ray."""
    going_on = resume_of(resume, run)
    roles = load_roles(file)
    config = load_run_config(roles)
    role_members(roles, config, Path("RUN"))  # refused before a folder is made
    # All roles are given the run's folder: none has to guess which run is meant.
    place = run or run_to_continue(config, resume=going_on) or claim_run_folder(config)
    members = role_members(roles, config, place)
    print(f"run folder: {place}", flush=True)
    if on == "ray":
        from agentloop.launch.ray_cluster import launch_on_ray

        raise typer.Exit(launch_on_ray(members, place, roles.ray))
    raise typer.Exit(launch_here(members, place))
