"""A real vLLM on this machine's CPU, for the length of a `with`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentloop.engines.publish.engine_control import EngineControl
from agentloop.engines.serving.engine_process import EngineProcess
from agentloop.engines.serving.vllm_command import LOOPBACK, ServeOptions, serve_command, serve_environment
from tests.vllm.environment import EXECUTABLE

KEY = "a-key-for-tests"
SMALL = ("--enforce-eager", "--max-num-seqs", "64")
"""Nothing is compiled."""
SMALL_MACHINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
START_S = 600.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def options(model: Path, *further: str, port: int, lora_rank: int = 0, number_type: str = "float32") -> ServeOptions:
    words = (*SMALL, *further)
    return ServeOptions(str(model), "tiny", port, number_type, 2048, lora_rank, words)


def beside_a_learner(vllm: Path, folder: Path) -> Path:
    """A program that starts vLLM so that it has the cores which others leave; on a GPU it is in nobody's way.

    Linux shares the cores out between sessions first: being nice counts within one alone.
    """
    program = folder / "vllm"
    program.write_text(
        f"""#!/bin/sh
[ -w /proc/self/autogroup ] && echo 15 > /proc/self/autogroup
exec nice -n 10 {vllm} "$@"
"""
    )
    program.chmod(0o755)
    return program


@contextmanager
def real_engine(
    model: Path, folder: Path, *further: str, lora_rank: int = 0, number_type: str = "float32"
) -> Iterator[EngineControl]:
    """Serve `model`; the server's log is in `folder`, and the server is gone after the `with`."""
    chosen = options(model, *further, port=free_port(), lora_rank=lora_rank, number_type=number_type)
    environment = serve_environment(chosen, KEY, {**os.environ, **SMALL_MACHINE})
    command = serve_command(beside_a_learner(EXECUTABLE, folder), chosen)
    process = EngineProcess(command, environment, port=chosen.port, log=folder / "vllm.log")
    try:
        with EngineControl(chosen.url, model=chosen.served_model_name, key=KEY) as control:
            process.wait_until(control.healthy, limit_s=START_S, stopped=lambda: False)
            yield control
    finally:
        process.end()
