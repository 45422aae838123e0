"""`vllm serve` as a process: the command that makes proved publishing possible, its start, and its end."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from agentloop.engines.remote.server_facts import KEY_VARIABLE, LEAST_VERSION, check_version
from agentloop.errors import UserError, one_line, shortened

LOOPBACK = "127.0.0.1"
EXECUTABLE_VARIABLE = "AGENTLOOP_VLLM"
_VLLM_KEY_VARIABLE = "VLLM_API_KEY"
START_S = 1800.0
"""Seconds to start: vLLM first compiles, and captures graphs."""
_VERSION_S = 300.0
"""Seconds for `vllm --version`, whose imports take a while."""
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM can be set to; adapters may have fewer."""
_PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables that name this program's packages; vLLM has packages of its own."""
_LOOK_AGAIN_S = 0.5
_GRACE_S = 20.0
_LAST_LINES = 200
_CAUSES = ("Error:", "error:")
# The kernel signals this program when its parent is gone, however that ended; it then kills its whole group. The group
# gets SIGTERM too. This program's handler, which its children do not inherit, lets it outlive them.
_ENDS_WITH_PARENT = """\
import ctypes, os, signal, subprocess, sys
signal.signal(signal.SIGUSR1, lambda *_: os.killpg(0, signal.SIGKILL))
signal.signal(signal.SIGTERM, lambda *_: None)
ctypes.CDLL(None).prctl(1, signal.SIGUSR1)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
code = subprocess.call(sys.argv[2:])
sys.exit(code if code >= 0 else 128 - code)
"""


@dataclass(frozen=True)
class ServeOptions:
    """The settings of vLLM that may be chosen; all others follow from proved publishing."""

    model: str
    """A folder or a hub id."""
    served_model_name: str = "policy"
    port: int = 8000
    dtype: str = "auto"
    max_model_len: int | None = None
    """None: as long as the model allows."""
    lora_rank: int = 0
    """The largest rank of an adapter; 0: whole models are published."""
    further: tuple[str, ...] = ()
    """Further words for `vllm serve`."""
    memory_share: float | None = None
    """The share of the device's memory for weights and key-value cache together; None: vLLM's own default."""
    sleep_level: Literal[0, 1, 2] = 0
    """How it sleeps while a learner has the GPU. 0: it never sleeps. 1: weights move to the host's memory. 2: weights
    are discarded. Both 1 and 2 discard the key-value cache.
    """
    shares_memory: bool = False
    """Weights come through the GPU's memory. Whoever reaches the port can then run programs as vLLM's user."""

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"


def find_vllm(environment: Mapping[str, str]) -> Path:
    """Find vLLM where AGENTLOOP_VLLM says, or on the PATH. Raises UserError for none or an old one."""
    wanted = os.environ.get(EXECUTABLE_VARIABLE) or "vllm"
    found = shutil.which(wanted)
    if found is None:
        raise UserError(
            f"{EXECUTABLE_VARIABLE} must be vLLM's own executable, got {wanted!r}, which is not there. Install vLLM in "
            "an environment of its own (python -m venv vllm-env; vllm-env/bin/pip install "
            f"'vllm>={LEAST_VERSION}'), then set {EXECUTABLE_VARIABLE}=vllm-env/bin/vllm."
        )
    check_version(_read_version(found, environment), key=EXECUTABLE_VARIABLE, where=found)
    return Path(found)


def _read_version(executable: str, environment: Mapping[str, str]) -> str:
    """Ask an executable for its version, which is a line of its own among the output of its imports."""
    try:
        printed = subprocess.run(
            [executable, "--version"], env=environment, capture_output=True, text=True, timeout=_VERSION_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return one_line(error)
    lines = printed.stdout.split("\n")
    return next((line for line in lines if re.match(r"\d+\.\d+", line)), f"exit code {printed.returncode}")


def serve_command(executable: Path, options: ServeOptions) -> list[str]:
    """Return the command's words. They hold no key: every user of the machine can see them."""
    command = [str(executable), "serve", options.model, "--served-model-name", options.served_model_name]
    # Routes that change the weights ask for no key.
    command += ["--host", LOOPBACK, "--port", str(options.port), "--dtype", options.dtype]
    command += ["--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
    if options.max_model_len is not None:
        command += ["--max-model-len", str(options.max_model_len)]
    if options.lora_rank:
        # Two versions at the same time: unfinished replies finish with the previous one.
        allowed = next((rank for rank in _LORA_RANKS if rank >= options.lora_rank), options.lora_rank)
        command += ["--enable-lora", "--max-lora-rank", str(allowed), "--max-loras", "2"]
    if options.memory_share is not None:
        command += ["--gpu-memory-utilization", f"{options.memory_share:g}"]
    if options.sleep_level:
        command.append("--enable-sleep-mode")
    if options.shares_memory:
        command += ["--weight-transfer-config", '{"backend": "ipc"}']
    return [*command, *options.further]


def serve_environment(options: ServeOptions, key: str | None, base: Mapping[str, str]) -> dict[str, str]:
    """Return vLLM's environment variables, made from `base`."""
    kept = {name: value for name, value in base.items() if name not in (*_PYTHON_VARIABLES, KEY_VARIABLE)}
    kept["VLLM_SERVER_DEV_MODE"] = "1"
    kept.setdefault("VLLM_NO_USAGE_STATS", "1")
    if options.lora_rank:
        kept["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if options.shares_memory:
        kept["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles of memory come pickled
    if key is not None:
        kept[_VLLM_KEY_VARIABLE] = key
    return kept


class EngineProcess:
    """A process that the constructor starts. Its output is appended to `log`. On Linux it ends with this process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, port: int, log: Path) -> None:
        _check_free(port)
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("ab") as output:
            self._process = _start_process(command, environment, output)

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def wait_until(self, ready: Callable[[], bool], *, limit_s: float, stopped: Callable[[], bool]) -> bool:
        """Wait until it is ready; False if `stopped` is true first. Raises UserError when it ends, or is too slow."""
        end = time.monotonic() + limit_s
        while not stopped():
            if self.exit_code is not None:
                raise UserError(
                    f"vllm serve must start, got exit code {self.exit_code}: {self.last_error()} "
                    f"See its log: {self.log}"
                )
            if ready():
                return True
            if time.monotonic() > end:
                raise UserError(f"vllm serve must answer within {limit_s:g} s, got nothing. See its log: {self.log}")
            time.sleep(_LOOK_AGAIN_S)
        return False

    def last_error(self) -> str:
        """Return the last line of its output that names an error, else the last line."""
        with self.log.open(encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in deque(file, _LAST_LINES) if line.strip()]
        causes = [line for line in lines if any(cause in line for cause in _CAUSES)]
        return shortened((causes or lines or ["it said nothing."])[-1])

    def end(self) -> None:
        """End it and every process it started: by SIGTERM, and after a while by SIGKILL."""
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        # Its workers may outlive it.
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@contextmanager
def vllm_process(
    options: ServeOptions, key: str | None, *, folder: Path, say: Callable[[str], None]
) -> Iterator[EngineProcess]:
    """Run `vllm serve` within the block, with a log in `folder`. Raises UserError."""
    environment, log = serve_environment(options, key, os.environ), folder / f"engine-{options.port}.log"
    command = serve_command(find_vllm(environment), options)
    say(f"starting vllm serve {options.model} (log: {log})")
    process = EngineProcess(command, environment, port=options.port, log=log)
    try:
        yield process
    finally:
        process.end()


def _start_process(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    before = [sys.executable, "-I", "-S", "-c", _ENDS_WITH_PARENT, str(os.getpid())]
    # It has a process group of its own: Ctrl-C reaches only this program, which then ends the group.
    return subprocess.Popen(
        [*(before if sys.platform == "linux" else ()), *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listening:
        return int(listening.getsockname()[1])


def _check_free(port: int) -> None:
    try:
        socket.create_server((LOOPBACK, port)).close()
    except OSError as error:
        raise UserError(
            f"--port must be free, got {port}: {error.strerror}. End the program there, or choose another port."
        ) from error
