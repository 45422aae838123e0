"""The Berkeley Function Calling Leaderboard, version 4: single questions, and dialogues about simulated APIs.

`bfcl_rows.py` writes the rows. BFCL's own checkers decide. They run with its APIs in sandboxed processes, which no two
episodes share, and are given calls that were made from parsed JSON.
"""

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from agentloop import Environment, Message, NotJudged, Observation, Task, ToolCall
from agentloop.environments.sandbox import SandboxKind, SandboxLimits
from agentloop.environments.sandbox.bubblewrap import contained
from agentloop.environments.sandbox.python_sandbox import usable_interpreter
from agentloop.errors import UserError

PACKAGES = ("bfcl_eval", "mpmath")
LIMITS = SandboxLimits(seconds=9.0)  # for each answer of a process, and for all of its CPU time
MORE = "{functions}\nI have updated some more functions you can choose from. What about now?"
"""What BFCL tells models that read functions in their prompt when it hands out those that it held back."""

# `ast_checker` imports every model of BFCL to learn whether dots in names became underscores. Here they stay.
_PROGRAM = """\
import json, os, sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace
sys.path[:0] = sys.argv[1:]
models = sys.modules["bfcl_eval.constants.model_config"] = ModuleType("models")
models.MODEL_CONFIG_MAPPING = defaultdict(lambda: SimpleNamespace(underscore_to_dot=False))
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
def check_calls(row, calls):
    from bfcl_eval.eval_checker.ast_eval.ast_checker import Language, ast_checker
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
    print(json.dumps(answer), file=answers, flush=True)
"""


class World:
    """A process with the simulated APIs of one episode and BFCL's checkers. All that it holds ends with it."""

    def __init__(self, sandbox: SandboxKind) -> None:
        folders = [Path(find_spec(name).origin).parent for name in PACKAGES]
        python = usable_interpreter() if sandbox == "bubblewrap" else sys
        words = [python.executable, "-I", "-c", _PROGRAM, *(str(folder.parent) for folder in folders)]
        if sandbox == "bubblewrap":
            words = contained(words, LIMITS, shown=[python.prefix, *map(str, folders)])
        self._process = Popen(words, text=True, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)

    def ask(self, name: str, *given: Any) -> Any:
        """Return what a function of the process returned. Raises NotJudged if it raised, took too long or is gone."""
        timer = threading.Timer(LIMITS.seconds, self._process.kill)
        timer.start()
        try:
            print(json.dumps([name, given]), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except OSError:  # the process has ended
            line = ""
        finally:
            timer.cancel()
        value, error = json.loads(line) if line.endswith("\n") else (None, "a process that has ended")
        if error is not None:
            raise NotJudged(f"BFCL must be able to {name.replace('_', ' ')}, got {error}")
        return value

    def close(self) -> None:
        try:  # the program ends with its input, and a kill while bubblewrap begins would leave a process behind
            self._process.communicate(timeout=LIMITS.seconds)
        finally:
            self._process.kill()


class Bfcl(Environment):
    """What both kinds of rows share: the first question and the functions of the row."""

    def __init__(self, *, sandbox: SandboxKind = "bubblewrap") -> None:
        self.sandbox = sandbox
        if not all(map(find_spec, PACKAGES)):
            raise UserError("BFCL needs its package, got none. Run pip install --no-deps bfcl-eval==2026.3.23 mpmath.")

    def task_from_row(self, row: Mapping[str, Any]) -> Task:
        return Task(tuple(Message(said["role"], said["content"]) for said in row["question"][0]), row)

    def tools_for(self, task: Task) -> list[Mapping[str, Any]]:
        return [tool_of(function) for function in task.payload["function"]]

    def judged(self, checker: str, *given: Any) -> float:
        """Ask one of BFCL's checkers, in a process that no episode has used."""
        with closing(World(self.sandbox)) as world:
            return float(world.ask(checker, *given))


class SingleTurn(Bfcl):
    """The first reply is the answer: its calls, or in the categories of irrelevance a text without any."""

    rewards_every_end = True

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Observation:
        return Observation("The answer was taken.", over=True)

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        replies = messages[len(task.messages()) :]
        if "ground_truth" not in task.payload:
            return float(self.stop_reason == "answered" and len(replies) == 1 and not replies[0].tool_calls)
        calls = [{call.name: call.arguments} for reply in replies[:1] for call in reply.tool_calls]
        readable = calls and all(isinstance(arguments, dict) for call in calls for arguments in call.values())
        return self.judged("check_calls", task.payload, calls) if readable else 0.0


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
        return super().tools_for(task) + [tool_of({**function, **later}) for function in held_back]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        later = (functions for turn, functions in held_back_by(self.row).items() if turn > self.turn)
        if any(function["name"] == name for function in chain.from_iterable(later)):
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
            elif waiting and counts(call := waiting.pop(0), message, held_back_by(task.payload), len(turns) - 1):
                turns[-1][-1].append(written(call))
        made = [[step for step in turn if step] for turn in turns]
        whole = len(made) == len(task.payload["question"])
        return self.judged("check_turns", task.payload, made) if whole else 0.0


def counts(call: ToolCall, answer: Message, held_back: Mapping[int, list[dict[str, Any]]], turn: int) -> bool:
    """Tell whether BFCL would have run a call: it does so with arguments that do not fit, which are refused here."""
    if answer.error_kind != "bad_arguments":
        return answer.error_kind is None
    later = {function["name"] for when, functions in held_back.items() if when > turn for function in functions}
    fits = isinstance(call.arguments, Mapping) and all(name.isidentifier() for name in call.arguments)
    return fits and call.name not in later


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
    return schema | ({"items": json_schema(described["items"])} if "items" in described else {})


def written(call: ToolCall) -> str:
    """Write a call as BFCL's programs read it: Python, made of a known name, names of arguments, and their values."""
    if not all(name.isidentifier() for name in call.arguments):
        raise ValueError(f"{call.name} has other arguments")
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"
