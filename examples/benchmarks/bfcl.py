"""The Berkeley Function Calling Leaderboard, version 4: single questions, and dialogues about simulated APIs.

`bfcl_rows.py` writes the rows. BFCL's own checkers decide. They run with its APIs in sandboxed processes, which no two
episodes share, and are given calls that were made from parsed JSON.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from agentloop import Environment, Message, NotJudged, Observation, Task, ToolCall
from agentloop.environments.sandbox import SandboxKind, SandboxLimits
from agentloop.environments.sandbox.bubblewrap import contained
from agentloop.environments.sandbox.python_sandbox import usable_interpreter
from agentloop.errors import UserError

PACKAGES = {"bfcl_eval": "bfcl-eval==2026.3.23", "mpmath": "mpmath"}
LIMITS = SandboxLimits(seconds=9.0)
"""One question to the process may take these seconds, and so may all CPU time of an episode."""
MORE = "{functions}\nI have updated some more functions you can choose from. What about now?"
"""What BFCL tells models that read functions in their prompt when it hands out those that it held back."""

# `ast_checker` imports every model of BFCL to learn whether dots in names became underscores. Here they stay.
_PROGRAM = """\
import json, os, sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace
sys.path[:0] = sys.argv[1:]
models = ModuleType("bfcl_eval.constants.model_config")
models.MODEL_CONFIG_MAPPING = defaultdict(lambda: SimpleNamespace(underscore_to_dot=False))
sys.modules[models.__name__] = models
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
def check_calls(row, calls):
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
    given = row["function"], calls, row["ground_truth"], Language.PYTHON, row["category"], "agentloop"
    return ast_checker(*given)["valid"]
def call(row, written):
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call as execute
    return execute([written], row["initial_config"], row["involved_classes"], "agentloop", row["id"])[0][0]
def check_turns(row, turns):
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
    return multi_turn_checker(turns, row["ground_truth"], row, row["category"], "agentloop")["valid"]
for line in sys.stdin:
    name, given = json.loads(line)
    try:
        answer = [globals()[name](*given), None]
    except Exception as error:
        answer = [None, type(error).__name__ + ": " + str(error)[:200]]
    answers.write(json.dumps(answer) + "\\n")
    answers.flush()
"""


class World:
    """A process with the simulated APIs of one episode and BFCL's checkers. All that it holds ends with it."""

    def __init__(self, sandbox: SandboxKind) -> None:
        folders = [str(Path(find_spec(name).origin).parent) for name in PACKAGES]
        ends = ["-I", "-c", _PROGRAM, *(str(Path(folder).parent) for folder in folders)]
        words = [sys.executable, *ends]
        if sandbox == "bubblewrap":
            python = usable_interpreter()
            words = contained([python.executable, *ends], LIMITS, shown=[python.prefix, *folders])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(words, text=True, **pipes)

    def ask(self, name: str, *given: Any) -> Any:
        """Return what a function of the process returned. Raises NotJudged if it raised, took too long or is gone."""
        timer = threading.Timer(LIMITS.seconds, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps([name, given]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError as gone:
            raise NotJudged(f"BFCL's process must run, got {gone}") from gone
        finally:
            timer.cancel()
        value, error = json.loads(line) if line.endswith("\n") else (None, "a process that has ended")
        if error is not None:
            raise NotJudged(f"BFCL must be able to {name.replace('_', ' ')}, got {error}")
        return value

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Bfcl(Environment):
    """What both kinds of rows share: the first question and the functions of the row."""

    def __init__(self, *, sandbox: SandboxKind = "bubblewrap") -> None:
        self.sandbox = sandbox
        for name, wanted in PACKAGES.items():
            if find_spec(name) is None:
                raise UserError(f"BFCL needs {wanted}, got none. Run pip install --no-deps {wanted}.")

    def task_from_row(self, row: Mapping[str, Any]) -> Task:
        return Task(tuple(Message(said["role"], said["content"]) for said in row["question"][0]), row)

    def tools_for(self, task: Task) -> list[Mapping[str, Any]]:
        return [tool_of(function) for function in task.payload["function"]]

    def judged(self, checker: str, *given: Any) -> float:
        """Ask one of BFCL's checkers, in a process that no episode has used."""
        world = World(self.sandbox)
        try:
            return float(world.ask(checker, *given))
        finally:
            world.close()


class SingleTurn(Bfcl):
    """The first reply is the answer: its calls, or in the categories of irrelevance a text without any."""

    rewards_every_end = True

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Observation:
        return Observation("The answer was taken.", over=True)

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        replies = messages[len(task.messages()) :]
        if "ground_truth" not in task.payload:
            return float(self.stop_reason == "answered" and len(replies) == 1 and not replies[0].tool_calls)
        calls = [call for reply in replies[:1] for call in reply.tool_calls]
        if not calls or not all(isinstance(call.arguments, dict) for call in calls):
            return 0.0
        return self.judged("check_calls", task.payload, [{call.name: call.arguments} for call in calls])


class MultiTurn(Bfcl):
    """A user asks several questions. What the calls did to the APIs is checked after the last answer."""

    def start(self, task: Task) -> None:
        self.row, self.turn, self.world = task.payload, 0, World(self.sandbox)

    def close(self) -> None:
        self.world.close()

    def tools_for(self, task: Task) -> list[Mapping[str, Any]]:
        """Return the row's functions, and of those that are held back the names alone."""
        later = {"description": "Not available yet.", "parameters": {"type": "dict", "properties": {}}}
        held_back = chain.from_iterable(held_back_by(task.payload).values())
        return [*super().tools_for(task), *(tool_of({**function, **later}) for function in held_back)]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        for turn, functions in held_back_by(self.row).items():
            if self.turn < turn and any(function["name"] == name for function in functions):
                raise ValueError(f"{name} is not available yet")
        return self.world.ask("call", self.row, written(ToolCall(name, arguments)))

    def respond(self, task: Task, messages: Sequence[Message]) -> str | None:
        self.turn += 1
        if self.turn == len(self.row["question"]):
            return None
        asked = "\n".join(said["content"] for said in self.row["question"][self.turn])
        return asked or MORE.format(functions=json.dumps(held_back_by(self.row)[self.turn]))

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        """Return 1 if BFCL's checker finds the same state and results as after the known calls, turn by turn."""
        turns: list[list[list[str]]] = [[]]
        waiting: list[ToolCall] = []
        for message in messages[len(task.messages()) :]:
            if message.role == "user":
                turns.append([])
            elif message.role == "assistant":
                turns[-1].append([])
                waiting = list(message.tool_calls)
            elif waiting and (call := waiting.pop(0)) and message.error_kind is None:
                turns[-1][-1].append(written(call))
        made = [[step for step in turn if step] for turn in turns]
        whole = len(made) == len(task.payload["question"])
        return self.judged("check_turns", task.payload, made) if whole else 0.0


def held_back_by(row: Mapping[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """Return the functions that are handed out later, by the turn in which they are."""
    return {int(turn): functions for turn, functions in row.get("missed_function", {}).items()}


def tool_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """Write one of BFCL's functions as a tool."""
    shown = {"description": function["description"], "parameters": json_schema(function["parameters"])}
    return {"type": "function", "function": {"name": function["name"], **shown}}


def json_schema(described: Mapping[str, Any]) -> dict[str, Any]:
    """Translate BFCL's names of types, as BFCL itself does for the models that it asks."""
    kinds = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
    schema = {key: described[key] for key in ("description", "enum", "default", "required") if key in described}
    schema["type"] = kinds.get(described["type"], described["type"])
    if "properties" in described:
        schema["properties"] = {name: json_schema(each) for name, each in described["properties"].items()}
    if "items" in described:
        schema["items"] = json_schema(described["items"])
    return schema


def written(call: ToolCall) -> str:
    """Write a call as BFCL's programs read it: Python, made of a known name, names of arguments, and their values."""
    for name in call.arguments:
        if not name.isidentifier():
            raise ValueError(f"{call.name} has no argument {name!r}")
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"
