"""Tasks of reasoning-gym: a hundred families of questions that programs make and score.

`environment.options: {family: chain_sum}` chooses the family. To score an answer some families evaluate it as code, so
a sandboxed process does that, with a fork of itself for each answer. Some questions depend on the order of sets, so
that process makes them too, with one seed of hashes.
"""

import json
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random
from subprocess import DEVNULL, PIPE, Popen
from threading import Lock, Timer
from typing import Any

from agentloop import Message, NotJudged, Task
from agentloop.environments.sandbox import SandboxedPython, SandboxKind, SandboxLimits
from agentloop.environments.sandbox.bubblewrap import contained
from agentloop.environments.sandbox.python_sandbox import usable_interpreter
from agentloop.errors import UserError

ASKED = "\nWrite your final answer alone between <answer> and </answer>."
LIMITS = SandboxLimits(seconds=20.0, memory_mb=4096)  # for each answer

_PROGRAM = """\
import json, os, sys
sys.path[:0] = sys.argv[1:]
os.environ["OPENBLAS_NUM_THREADS"] = "1"
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
import reasoning_gym
for line in sys.stdin:
    if os.fork():
        os.wait()
        continue
    name, settings, seed, answer = json.loads(line)
    try:
        family = reasoning_gym.create_dataset(name, seed=seed, size=1, **settings)
        made = [family[0]["question"] if answer is None else family.score_answer(answer, family[0]), None]
    except Exception as error:
        made = [None, repr(error)[:200]]
    print(json.dumps(made), file=answers, flush=True)
    os._exit(0)
"""


class Families:
    """The process that makes questions and scores answers. A new one begins where a limit ended the last one."""

    def __init__(self, sandbox: SandboxKind) -> None:
        self._sandbox, self._lock = sandbox, Lock()
        self._process: Popen[str] | None = None

    def ask(self, family: str, settings: dict[str, Any], seed: int, answer: str | None = None) -> Any:
        """Return the question of a seed, or the score of an answer to it.

        Raises NotJudged if the family's program raised, took too long or ended.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = Popen(self._command(), text=True, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
            timer = Timer(LIMITS.seconds, self._process.kill)
            timer.start()
            try:
                print(json.dumps([family, settings, seed, answer]), file=self._process.stdin, flush=True)
                line = self._process.stdout.readline()
            except OSError:  # the process has ended
                line = ""
            finally:
                timer.cancel()
            if not (whole := line.endswith("\n")):
                self._process.kill()
                self._process.wait()
        made, error = json.loads(line) if whole else (None, "a process that has ended")
        if error is not None:
            raise NotJudged(f"reasoning-gym must make questions and score any answer, got {error}")
        return made

    def _command(self) -> list[str]:
        folders = {str(Path(find_spec(name).origin).parent.parent): None for name in ("reasoning_gym", "sympy")}
        python = usable_interpreter() if self._sandbox == "bubblewrap" else sys
        words = ["env", "PYTHONHASHSEED=0", python.executable, "-s", "-P", "-c", _PROGRAM, *folders]
        return words if python is sys else contained(words, LIMITS, shown=[python.prefix, *folders])


families = cache(Families)


class ReasoningGym(SandboxedPython):
    """Questions of one family, with the tool `run_python` or without tools."""

    def __init__(
        self,
        *,
        family: str,
        settings: dict[str, Any] | None = None,
        python: bool = False,
        sandbox: SandboxKind = "bubblewrap",
    ) -> None:
        if find_spec("reasoning_gym") is None:
            raise UserError("reasoning-gym must be installed, got no package. Run pip install reasoning-gym==0.1.25.")
        self.family, self.settings, self.python, self.families = family, settings or {}, python, families(sandbox)
        if python:
            super().__init__(sandbox=sandbox)

    def make_task(self, rng: Random) -> Task:
        seed = rng.randrange(2**31)
        return Task(self.families.ask(self.family, self.settings, seed) + ASKED, {"seed": seed})

    def tools_for(self, task: Task) -> list[str]:
        return ["run_python"] if self.python else []

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        """Return the family's score, from 0 to 1, of the last reply's answer: between the tags, or all of the reply."""
        _, _, behind = messages[-1].content.rpartition("<answer>")
        answer = behind.partition("</answer>")[0].strip()
        return float(self.families.ask(self.family, self.settings, task.payload["seed"], answer))
