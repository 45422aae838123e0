"""`agentloop engine | worker | launch | gateway`: the programs of a run besides its learner."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from agentloop.cli.options import Resume, ResumingCommand, RunPlace, read_resume, role_printer
from agentloop.config.sections.rollout import GatewaySection
from agentloop.engines.publish.engine_control import EngineControl
from agentloop.engines.remote.server_facts import read_key
from agentloop.engines.serving.engine_process import ServeOptions, vllm_process
from agentloop.engines.serving.engine_watch import SILENT_S, EngineWatch
from agentloop.engines.serving.served_engine import EngineEnded
from agentloop.errors import UserError, needing
from agentloop.launch.roles import load_roles, load_run_config, role_members
from agentloop.launch.supervision import run_roles
from agentloop.runs.run_folder import claim_run_folder, run_to_continue
from agentloop.runs.signals import end_at_once, graceful_stop, noted_signals
from agentloop.workers.joined_run import join_run
from agentloop.workers.worker import Worker
from replay.locate import place

_LOOK_AGAIN_S = 0.5
_GATEWAY_KEY = "AGENTLOOP_GATEWAY_KEY"
app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    epilog="A key is read from AGENTLOOP_ENGINE_KEY. "
    "Example: agentloop engine Qwen/Qwen3-8B --run runs/search-001 -- --tensor-parallel-size 2",
)
def engine(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub id that vLLM is started with.")],
    further: Annotated[
        list[str] | None, typer.Argument(metavar="[-- WORDS]", help="Passed on to vllm serve unchanged.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Folder of the run whose newest policy is served.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where it listens, on this machine only.")] = 8000,
    name: Annotated[str, typer.Option(help="What it calls the model.")] = "policy",
    dtype: Annotated[str, typer.Option(help="vLLM's numbers: auto, bfloat16, float32, ...")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a prompt and its reply; the model's limit if left out.")
    ] = None,
    lora_rank: Annotated[
        int, typer.Option(min=0, help="The run's lora.rank, when it trains adapters; 0: whole models are published.")
    ] = 0,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the run's folder.")] = 600.0,
    silence: Annotated[float, typer.Option(min=1, help="Seconds without an answer after which it ends.")] = SILENT_S,
) -> None:
    """Serve a run's policy with vLLM on this machine: started, watched, and always proved."""
    key, say = read_key(), role_printer("engine")
    with noted_signals() as asked:
        policies = None if run is None else _wait_for_policies(run, wait_s=wait, stopped=lambda: bool(asked), say=say)
        options = ServeOptions(model, name, port, dtype, max_model_len, lora_rank, tuple(further or ()))
        folder = Path("runs") if run is None else run
        with (
            EngineControl(options.url, model=name, key=key) as control,
            vllm_process(options, key, folder=folder, say=say) as process,
        ):
            try:
                EngineWatch(control, policies, say=say, stopped=lambda: bool(asked), silent_s=silence).serve(process)
            except EngineEnded as error:
                say(str(error))
                raise typer.Exit(1) from error


def _wait_for_policies(run: Path, *, wait_s: float, stopped: Callable[[], bool], say: Callable[[str], None]) -> Path:
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
    run: Annotated[Path, typer.Option(metavar="RUN", help="Folder of the run, which may come later.")],
    concurrency: Annotated[int, typer.Option(min=1, help="Most episodes at once.")] = 32,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the run.")] = 600.0,
) -> None:
    """Collect episodes for a run: claimed from its database, run on its engines, stored as they end."""
    say = role_printer("worker")
    with graceful_stop(say, working="leaving; again to end at once", idle="left") as stop:
        joined = join_run(run, wait_s=wait, note=say)
        say(f"collecting for {run}, {concurrency} episodes at once")
        with stop.working():
            Worker(joined, concurrency=concurrency, stop=stop, say=say).collect()
    sys.stdout.flush()
    sys.stderr.flush()
    end_at_once(stop.exit_code)  # a tool that never ends, or a database that never answers, is not waited for


@app.command(cls=ResumingCommand, epilog="Example: agentloop launch configs/cluster.yaml")
def launch(
    file: Annotated[Path, typer.Argument(metavar="ROLES", help="YAML file of the roles: see configs/cluster.yaml.")],
    run: RunPlace = None,
    resume: Resume = None,
) -> None:
    """Start the roles of a run: learner, engines, workers, on this machine."""
    going_on = read_resume(resume, run)
    roles = load_roles(file)
    config = load_run_config(roles)
    role_members(roles, config, Path("RUN"))  # mistakes are found before a folder is made
    # All roles get the run's folder, so none has to guess which run is meant.
    place = run or run_to_continue(config, resume=going_on) or claim_run_folder(config)
    members = role_members(roles, config, place)
    print(f"run folder: {place}", flush=True)
    raise typer.Exit(run_roles(members, place))


@app.command(
    epilog="Keys are read from AGENTLOOP_GATEWAY_KEY, what agents ask with, and AGENTLOOP_UPSTREAM_KEY. "
    "Example: agentloop gateway --record history.sqlite --upstream http://127.0.0.1:8000 --model models/qwen, "
    "or: agentloop gateway --run runs/search-001"
)
def gateway(
    record: Annotated[str | None, typer.Option(metavar="BUFFER", help="Store sessions there, to train later.")] = None,
    run: Annotated[Path | None, typer.Option(metavar="RUN", help="Or give the tickets of this run to agents.")] = None,
    upstream: Annotated[str | None, typer.Option(metavar="URL", help="The vLLM; with --text the base URL.")] = None,
    model: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Its tokenizer, template and config.")] = None,
    text: Annotated[bool, typer.Option("--text", help="The upstream gives no tokens: for imitation only.")] = False,
    upstream_model: Annotated[str | None, typer.Option(metavar="NAME", help="What the upstream calls it.")] = None,
    name: Annotated[str, typer.Option(help="Name of the recording; an existing one is continued.")] = "gateway",
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature of a vLLM upstream, above 0.")] = 1.0,
    idle_s: Annotated[float, typer.Option(min=0.1, help="Seconds without a request that end a session.")] = 3600.0,
    host: Annotated[
        str, typer.Option(help=f"Address to listen on; if others reach it, set {_GATEWAY_KEY}.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 8700,
    public_url: Annotated[str | None, typer.Option(metavar="URL", help="URL for agents, if another.")] = None,
) -> None:
    """Let agents of any kind ask at a base URL: recorded for later runs, or as episodes of a run."""
    with needing("gateway", "agentloop gateway"):
        from agentloop.workers.episodes_on_request import give_episodes
        from agentloop.workers.recording import UPSTREAM_KEY, RecordingOptions, record_sessions
        from replay.pages.guard import LOOPBACK
    recorded = (record, upstream, model)
    if (run is None) != (None not in recorded) or (run is not None and any(recorded)):
        raise UserError(
            "--record, --upstream and --model must be given, or --run alone, got "
            f"{', '.join(str(one) for one in (*recorded, run))}. Example: agentloop gateway --run runs/search-001"
        )
    if temperature == 0:
        raise UserError(
            "--temperature must be above 0, got 0: nothing could be learned from such replies. Set it to 1."
        )
    key = read_key(_GATEWAY_KEY)
    if key is None and host not in LOOPBACK:
        raise UserError(
            f"{_GATEWAY_KEY} must be set where others reach --host, got none for {host}. Set it to a long secret."
        )
    if public_url is not None and not public_url.startswith(("http://", "https://")):
        raise UserError(f"--public-url must begin with http:// or https://, got {public_url!r}. Write the whole URL.")
    section = GatewaySection(host=host, port=port, public_url=public_url)

    say = role_printer("gateway")
    with graceful_stop(say, working="leaving; again to end at once", idle="left") as stop:
        if run is not None:
            give_episodes(run, section, key=key, idle_s=idle_s, stop=stop, say=say)
        else:
            assert record is not None and upstream is not None and model is not None
            asked = (upstream, read_key(UPSTREAM_KEY), upstream_model, text)
            options = RecordingOptions(name, model, *asked, 1.0 if text else temperature, idle_s)
            record_sessions(place(record)[0], options, section, key=key, stop=stop, say=say)
    say("left")
    end_at_once(stop.exit_code)  # an engine that never answers is not waited for
