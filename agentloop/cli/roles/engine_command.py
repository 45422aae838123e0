"""`agentloop engine MODEL`: a vLLM server beside the trainer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from agentloop.engines.publish.engine_control import EngineControl
from agentloop.engines.remote.connect import noted_end
from agentloop.engines.serving.engine_watch import SILENT_S, EngineWatch
from agentloop.engines.serving.vllm_command import (
    KEY_VARIABLE,
    ServeOptions,
    find_vllm,
    serve_command,
    serve_environment,
)
from agentloop.errors import UserError

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
    silence: Annotated[
        float, typer.Option(min=1, help="Seconds without an answer, as while it reads weights, before a new start.")
    ] = SILENT_S,
) -> None:
    """Serve a run's policy with vLLM on this machine: started, watched, started again, and always proved."""
    key = os.environ.get(KEY_VARIABLE) or None
    stop = _StopSignal()
    policies = None if run is None else _policies_of(run, wait_s=wait, stopped=stop.is_set)
    if (model is None) == (attach is None):
        raise UserError(
            f"MODEL must be given, or --attach, but not both, got {model} and {attach}. "
            "Example: agentloop engine Qwen/Qwen3-8B --run runs/search-001"
        )
    options = ServeOptions(model or "", name, port, dtype, max_model_len, lora_rank, tuple(further or ()))
    with EngineControl(attach or options.url, model=name, key=key) as control:
        watch = EngineWatch(control, policies, say=_say, stopped=stop.is_set, silent_s=silence)
        if attach is not None:
            watch.attach()
        else:
            folder = Path("runs") if run is None else run
            environment = serve_environment(options, key, os.environ)
            with noted_end(folder, port):
                command = serve_command(find_vllm(vllm, environment), options)
                log = folder / f"engine-{port}.log"
                watch.serve(command, environment, port=port, log=log, start_timeout_s=start_timeout)


class _StopSignal:
    """Set by Ctrl-C or SIGTERM."""

    def __init__(self) -> None:
        self._set = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def is_set(self) -> bool:
        return self._set

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._set = True


def _policies_of(run: Path, *, wait_s: float, stopped: Callable[[], bool]) -> Path:
    end = time.monotonic() + wait_s
    if wait_s and not run.is_dir():
        _say(f"waits for the run at {run}")
    while not run.is_dir() and not stopped():
        if time.monotonic() >= end:
            raise UserError(
                f"--run must be the folder of a run, got {str(run)!r}, which is not there after {wait_s:g} s. "
                "Start the run first."
            )
        time.sleep(_LOOK_AGAIN_S)
    return run / "policies"


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} engine: {text}", flush=True)
