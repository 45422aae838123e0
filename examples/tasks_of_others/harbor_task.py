"""A Harbor task without its container: the agent's commands and the task's tests run in the sandbox, from `/app`.

A row names the task's `folder`, which whoever runs in the sandbox may read.
"""

import json
import shutil
import subprocess
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from openai import OpenAI

from agentloop.environments.sandbox.bubblewrap import SandboxLimits, contained

MOST_TURNS = 30
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in /app.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
STEPS = {"FROM", "WORKDIR", "COPY", "#"}
"""What of a Dockerfile is known: files beside it are copied to /app, and the image is this machine."""


def solve(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """The reward that the task's tests write."""
    task = Path(row["folder"])
    limits = tomllib.loads((task / "task.toml").read_text())
    seconds = {part: limits.get(part, {}).get("timeout_sec", 600.0) for part in ("agent", "verifier")}
    dockerfile = (task / "environment/Dockerfile").read_text().splitlines()
    unknown = {line.split()[0] for line in dockerfile if line.strip()} - STEPS
    if unknown:
        raise ValueError(f"{task}/environment/Dockerfile must have no other steps than {STEPS}, got {unknown}.")
    with TemporaryDirectory() as name:
        home = Path(name)
        shutil.copytree(task / "environment", home / "app", ignore=shutil.ignore_patterns("Dockerfile"))
        (home / "logs/verifier").mkdir(parents=True)
        for path in (home, *home.rglob("*")):
            path.chmod(0o777)
        messages: list[Any] = [{"role": "user", "content": (task / "instruction.md").read_text()}]
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(MOST_TURNS):
                asked = client.chat.completions.create(model="policy", messages=messages, tools=[BASH])
                reply = asked.choices[0].message
                messages.append(reply.model_dump(exclude_none=True))
                for call in reply.tool_calls or []:
                    words = ["bash", "-c", str(json.loads(call.function.arguments).get("command"))]
                    said = run(home, words, seconds["agent"])
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
                if not reply.tool_calls:
                    break
        tests = ["--ro-bind", str(task / "tests"), "/tests", "--bind", str(home / "logs"), "/logs"]
        run(home, ["bash", "/tests/test.sh"], seconds["verifier"], *tests)
        text, numbers = home / "logs/verifier/reward.txt", home / "logs/verifier/reward.json"
        return float(json.loads(numbers.read_text())["reward"] if numbers.exists() else text.read_text())


def run(home: Path, words: list[str], seconds: float, *further: str) -> str:
    """What a command prints in /app, both streams, and how it ended."""
    limits = SandboxLimits(seconds=seconds, memory_mb=4096, processes=64, files_mb=256)
    binds = ["--bind", str(home / "app"), "/app", *further]
    whole = contained(["env", "--chdir=/app", *words], limits, shown=[], further=binds)
    with TemporaryFile() as output:
        try:
            code = subprocess.run(whole, stdout=output, stderr=output, timeout=seconds, check=False).returncode
            ending = f"[exit code {code}]"
        except subprocess.TimeoutExpired:
            ending = f"[it took more than {seconds} seconds]"
        output.seek(0)
        return output.read(20_000).decode(errors="replace") + ending
