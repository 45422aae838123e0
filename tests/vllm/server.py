"""A real vLLM on this machine's CPU, for the length of a `with`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentloop.engines.publish.engine_control import EngineControl
from agentloop.engines.serving.engine_process import (
    EngineProcess,
    ServeOptions,
    free_port,
    serve_command,
    serve_environment,
)
from tests.fakes.runs import ROOT

EXECUTABLE = ROOT / ".vllm" / "bin" / "vllm"
KEY = "a-key-for-tests"
SMALL = ("--enforce-eager", "--max-num-seqs", "64")
"""Nothing is compiled."""
SMALL_MACHINE = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
SMALL_MACHINE |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
START_S = 600.0


def missing() -> str | None:
    """Why the tests of a real server can't run on this machine; None where they can."""
    return None if (ROOT / ".vllm" / "installed.txt").exists() else "vLLM is not installed: make setup-vllm"


def beside_a_learner(folder: Path) -> Path:
    """A program that starts vLLM so that it has the cores which others leave; on a GPU it is in nobody's way.

    Linux shares the cores out between sessions first: being nice counts within one alone.
    """
    program = folder / "vllm"
    program.write_text(
        f"""#!/bin/sh
[ -w /proc/self/autogroup ] && echo 15 > /proc/self/autogroup
exec nice -n 10 {EXECUTABLE} "$@"
"""
    )
    program.chmod(0o755)
    return program


@contextmanager
def real_engine(
    model: Path, folder: Path, *further: str, lora_rank: int = 0, number_type: str = "float32"
) -> Iterator[EngineControl]:
    """Serve `model`; the server's log is in `folder`, and the server is gone after the `with`."""
    chosen = ServeOptions(str(model), "tiny", free_port(), number_type, 2048, lora_rank, (*SMALL, *further))
    environment = serve_environment(chosen, KEY, {**os.environ, **SMALL_MACHINE})
    command = serve_command(beside_a_learner(folder), chosen)
    process = EngineProcess(command, environment, port=chosen.port, log=folder / "vllm.log")
    try:
        with EngineControl(chosen.url, model=chosen.served_model_name, key=KEY) as control:
            process.wait_until(control.healthy, limit_s=START_S, stopped=lambda: False)
            yield control
    finally:
        process.end()


def is_of_server(folder: Path, port: int | str) -> bool:
    """Whether the process in this folder of /proc is of the server that listens on `port`."""
    leader = Path("/proc") / str(os.getsid(int(folder.name))) / "cmdline"
    return f"--port\0{port}\0" in leader.read_text()
