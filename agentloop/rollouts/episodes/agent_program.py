"""Runs a user's agent for one episode: a program or function that sends its requests to a base URL."""

import asyncio
import json
import math
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentloop.environments import Task
from agentloop.environments.program_tree import ending_all
from agentloop.environments.row_environment import AgentEnvironment, agent_function
from agentloop.environments.sandbox.agent_sandbox import INSIDE, contained_agent
from agentloop.environments.sandbox.bubblewrap import ENVIRONMENT
from agentloop.environments.tools.worker_threads import WorkerThreads
from agentloop.errors import shortened
from agentloop.rollouts.rewards import number_of
from agentloop.user_code import load_function

NOT_JUDGED = os.EX_TEMPFAIL
"""The exit code 75, with which an agent says that nobody can judge its episode."""
_TAIL = 4_000
"""Number of last characters of a program's output that are stored."""
_LAST_WORDS_S = 1.0
"""Seconds to wait for output after the end: a process that is no child of the agent may hold the pipe open."""


@dataclass(frozen=True)
class AgentAddress:
    """The address and key with which an agent reaches the policy."""

    url: str
    """Base URL of the episode; OpenAI's clients use /v1 below it, Anthropic's clients the URL itself."""
    key: str
    local_url: str
    """The same address on this machine, the only one that a sandbox can reach."""

    def variables(self, task: Path) -> dict[str, str]:
        """Make the environment variables that clients and agents read."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": self.key,
            "OPENAI_MODEL": "policy",
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "ANTHROPIC_MODEL": "policy",
            "ANTHROPIC_SMALL_FAST_MODEL": "aside",
            "AGENTLOOP_URL": self.url,
            "AGENTLOOP_TASK": str(task),
        }


@dataclass(frozen=True)
class AgentEnd:
    """How an agent's run ended."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards that the agent reported, by agent name; the empty name is the whole episode."""
    problem: str | None = None
    """What went wrong, in words; None: nothing did."""
    not_judged: bool = False
    """True if the agent's own surroundings failed, or if it said so: nobody can judge the policy."""
    output: str = ""
    """The last characters that the agent printed."""


async def run_agent(
    environment: AgentEnvironment, task: Task, address: AgentAddress, threads: WorkerThreads, *, timeout_s: float
) -> AgentEnd:
    """Run an agent to its end. After `timeout_s` all its processes are ended, and TimeoutError is raised.

    A function is called with the payload, the base URL and the key. A program gets the payload as a line of JSON on
    standard input and in the file AGENTLOOP_TASK. It reports its reward in a last line {"reward": number}, or the
    rewards of its agents in {"rewards": {agent: number}}. If a function raises NotJudged, so does this.
    """
    agent = environment.agent
    named = agent_function(agent)
    if named is not None:
        function = load_function(named, what="environment.agent")
        asked = (dict(task.payload), f"{address.url}/v1", address.key)
        given = await threads.ask(function, *asked, timeout_s=timeout_s, setting="rollout.episode_timeout_s")
        rewards = {} if given is None else _rewards(given)
        if rewards is None:
            return AgentEnd(problem=f"{agent} must return finite numbers, got {given!r}", not_judged=True)
        return AgentEnd(rewards)
    with tempfile.TemporaryDirectory(prefix="agentloop-agent-") as folder:
        path = Path(folder) / "task.json"
        path.write_text(f"{json.dumps(task.payload)}\n", encoding="utf-8")
        variables, command = address.variables(path), shlex.split(agent)
        if environment.limits is None:
            return await _run_program(command, path, {**os.environ, **variables}, timeout_s)
        inside = replace(address, url=INSIDE + urlsplit(address.local_url).path).variables(path)
        limits, gateway = replace(environment.limits, seconds=timeout_s), address.local_url
        sandbox = contained_agent(command, limits, read=environment.read, gateway=gateway, folder=Path(folder))
        async with sandbox as contained:
            variables = {**ENVIRONMENT, **inside}
            end = await _run_program(contained.words, path, variables, timeout_s, contained.status.fileno())
            if contained.is_lost:
                end = replace(end, problem=f"the sandbox did not start, or was lost: {end.problem}", not_judged=True)
            return end


def without_key(text: str, key: str) -> str:
    """Remove an episode's key from text that an agent wrote, even a key that was cut off."""
    return re.sub(f"{key[:8]}[0-9a-f]*", "***", text)


def _rewards(said: Any) -> dict[str, float] | None:
    """Read rewards by agent, with the whole episode under the empty name; None if a value is no finite number."""
    named = said if isinstance(said, Mapping) else {"": said}
    rewards = {str(agent): number_of(value) for agent, value in named.items()}
    return rewards if all(map(math.isfinite, rewards.values())) else None


class _Tail(asyncio.Protocol):
    """Reads a pipe and stores its last bytes."""

    def __init__(self, *kept: bytearray) -> None:
        self._kept = kept
        self.ended = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        for kept in self._kept:
            kept += data
            del kept[: -4 * _TAIL]

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)


async def _run_program(
    words: list[str], task: Path, variables: Mapping[str, str], timeout_s: float, *fds: int
) -> AgentEnd:
    """Run a program to its end; it inherits the file descriptors `fds`."""
    said, output, loop = bytearray(), bytearray(), asyncio.get_running_loop()
    # These pipes are made here, because asyncio's `wait` would also wait for other processes that hold its own.
    (said_end, stdout), (output_end, stderr) = os.pipe(), os.pipe()
    try:
        pipes = [
            await loop.connect_read_pipe(partial(_Tail, *kept), os.fdopen(end, "rb"))
            for end, kept in ((said_end, (said, output)), (output_end, (output,)))
        ]
        with task.open("rb") as given:
            streams: dict[str, Any] = {"stdin": given, "stdout": stdout, "stderr": stderr, "pass_fds": fds}
            process = await asyncio.create_subprocess_exec(
                *ending_all(words), **streams, env=variables, start_new_session=True
            )
    finally:
        os.close(stdout)
        os.close(stderr)
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    finally:
        with suppress(ProcessLookupError):
            process.terminate() if sys.platform == "linux" else os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await asyncio.wait([tail.ended for _, tail in pipes], timeout=_LAST_WORDS_S)
        for reading, _ in pipes:
            reading.close()
    texts = (each.decode(errors="replace") for each in (said, output))
    text, shown = (without_key(each, variables["OPENAI_API_KEY"]) for each in texts)
    last = text.strip().rpartition("\n")[2]
    rewards = _said_rewards(last)
    problem = f"the last line must give finite numbers, got {shortened(last)}" if rewards is None else None
    if process.returncode != 0:
        problem = f"exit code {process.returncode}"
    return AgentEnd(rewards or {}, problem, rewards is None or process.returncode == NOT_JUDGED, shown[-_TAIL:])


def _said_rewards(last: str) -> dict[str, float] | None:
    """Read a line {"reward": number} or {"rewards": {agent: number}}; empty for any other line, None for no number."""
    try:
        said = json.loads(last)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(said, Mapping) or not said.keys() & {"reward", "rewards"}:
        return {}
    return _rewards(said["rewards"] if "rewards" in said else {"": said["reward"]})
