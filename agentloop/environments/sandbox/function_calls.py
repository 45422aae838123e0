"""Calls a function of code that nobody has read, many times in one sandbox, which never sees the expected results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentloop.environments.sandbox.python_sandbox import PythonSandbox

_HARNESS = """\
import json, os
results = os.fdopen(os.dup(1), "w")
nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(nowhere, 1)
os.dup2(nowhere, 2)
def answer(value, error=None):
    results.write(json.dumps([value, error]) + "\\n")
    results.flush()
def trying(act):
    try:
        answer(act())
    except BaseException as error:
        answer(None, type(error).__name__ + ": " + str(error)[:200])
function = None
def find():
    global function
    names = {"__name__": "answer"}
    exec(compile(CODE, "answer.py", "exec"), names)
    function = names[NAME]
trying(find)
for arguments in json.loads(CALLS):
    trying(lambda: function(*arguments))
os._exit(0)
"""


@dataclass(frozen=True)
class Returned:
    """What became of one call."""

    value: Any
    """As JSON has it: a tuple is a list. None where there is an error."""
    error: str | None = None
    """What the code raised, or which limit ended it before this call was done."""

    def equals(self, expected: Any) -> bool:
        """True if it returned this value, of this type: 1 is neither 1.0 nor True."""
        return self.error is None and json.dumps(self.value, sort_keys=True) == json.dumps(expected, sort_keys=True)


def call_function(sandbox: PythonSandbox, code: str, name: str, calls: Sequence[Sequence[Any]]) -> tuple[Returned, ...]:
    """What the function `name` of `code` returns for each call's arguments, in one program with one set of limits."""
    program = f"CODE = {code!r}\nNAME = {name!r}\nCALLS = {json.dumps([list(call) for call in calls])!r}\n{_HARNESS}"
    run = sandbox.run(program)
    answers = [answer for line in run.output.splitlines() if (answer := _read(line)) is not None]
    if answers and answers[0].error is not None:
        return (answers[0],) * len(calls)
    missing = Returned(None, run.observation().splitlines()[-1] if not run.succeeded else "it ended early")
    found = answers[1 : len(calls) + 1]
    return (*found, *[missing] * (len(calls) - len(found)))


def _read(line: str) -> Returned | None:
    """None for what the harness has not written whole."""
    try:
        value, error = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    return Returned(value, None if error is None else str(error))
