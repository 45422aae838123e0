"""How `vllm serve` is started so that a policy can be published to it: its words, and its environment."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentloop.engines.remote.server_facts import LEAST_VERSION, check_version
from agentloop.errors import UserError, one_line

LOOPBACK = "127.0.0.1"
EXECUTABLE_VARIABLE, KEY_VARIABLE = "AGENTLOOP_VLLM", "AGENTLOOP_ENGINE_KEY"
_THEIR_KEY_VARIABLE = "VLLM_API_KEY"
_VERSION_S = 300.0
"""Its imports take a while."""
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as the most; adapters may have fewer."""
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""They name this program's packages; vLLM has its own."""


@dataclass(frozen=True)
class ServeOptions:
    """What a person may choose; every other setting is what proved publishing needs."""

    model: str
    """A folder or a hub id."""
    served_model_name: str = "policy"
    port: int = 8000
    dtype: str = "auto"
    max_model_len: int | None = None
    """None: as long as the model allows."""
    lora_rank: int = 0
    """Most ranks of an adapter; 0: whole models are published."""
    further: tuple[str, ...] = ()
    """Words for `vllm serve` that are passed on as they are."""
    memory_share: float | None = None
    """What it takes of the device's memory, for weights and key-value cache together; None: vLLM's own default."""
    sleep_level: Literal[0, 1, 2] = 0
    """How it sleeps while a learner has the GPU. 1: weights move to the host's memory, 2: they are discarded; the
    key-value cache is, at both. 0: it never does.
    """
    shares_memory: bool = False
    """Weights come through the GPU's memory. Whoever reaches its port can then run programs as its user does."""

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"


def find_vllm(named: Path | None, environment: Mapping[str, str], *, key: str = "--vllm") -> Path:
    """The executable named, else AGENTLOOP_VLLM's, else the PATH's. Raises UserError for none or an old one."""
    wanted = named or os.environ.get(EXECUTABLE_VARIABLE) or "vllm"
    found = shutil.which(wanted)
    if found is None:
        raise UserError(
            f"{key} must be vLLM's own executable, got {str(wanted)!r}, which is not there. Install vLLM in an "
            "environment of its own (python -m venv vllm-env; vllm-env/bin/pip install "
            f"'vllm>={LEAST_VERSION}'), then set {EXECUTABLE_VARIABLE}=vllm-env/bin/vllm."
        )
    check_version(_version_of(found, environment), key=key, where=found)
    return Path(found)


def _version_of(executable: str, environment: Mapping[str, str]) -> str:
    """What it prints: the version is a line of its own, among what its imports have to say."""
    try:
        said = subprocess.run(
            [executable, "--version"], env=environment, capture_output=True, text=True, timeout=_VERSION_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return one_line(error)
    lines = said.stdout.split("\n")
    return next((line for line in lines if re.match(r"\d+\.\d+", line)), f"exit code {said.returncode}")


def serve_command(executable: Path, options: ServeOptions) -> list[str]:
    """The words to start. No key is among them: every user of the machine sees them."""
    command = [str(executable), "serve", options.model, "--served-model-name", options.served_model_name]
    # Routes that change the weights ask for no key.
    command += ["--host", LOOPBACK, "--port", str(options.port), "--dtype", options.dtype]
    command += ["--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
    if options.max_model_len is not None:
        command += ["--max-model-len", str(options.max_model_len)]
    if options.lora_rank:
        # Two versions at once: replies under way finish with the one before.
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
    """The environment to start it in, made from `base`."""
    kept = {name: value for name, value in base.items() if name not in (*_OURS, KEY_VARIABLE)}
    kept["VLLM_SERVER_DEV_MODE"] = "1"
    kept.setdefault("VLLM_NO_USAGE_STATS", "1")
    if options.lora_rank:
        kept["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if options.shares_memory:
        kept["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles of memory come pickled
    if key is not None:
        kept[_THEIR_KEY_VARIABLE] = key
    return kept
