"""An agent that writes a Python function, tries it on an example, and hands it in to hidden tests."""

from collections.abc import Mapping, Sequence
from typing import Any

from agentloop import Environment, Message, Task, tool
from agentloop.environments.sandbox import PythonSandbox, Returned, SandboxKind, SandboxLimits, call_function

SYSTEM_PROMPT = "Write solve(xs) in Python and try it. The code that you try last is handed in. Then say: Done."
DONE = "Done."


class CodingAgent(Environment):
    """Reward 1 if the code that was tried last passes all hidden tests, else 0. Everything runs in a sandbox."""

    def __init__(self, *, sandbox: SandboxKind = "bubblewrap", limits: SandboxLimits | None = None) -> None:
        self._sandbox = PythonSandbox(sandbox, limits)
        self._example: Mapping[str, Any] = {}

    def task_from_row(self, row: Mapping[str, Any]) -> Task:
        example = row["example"]
        problem = f"{row['problem']}\nExample: solve({example['xs']}) is {example['result']}"
        return Task((Message("system", SYSTEM_PROMPT), Message("user", problem)), row)

    def start(self, task: Task) -> None:
        self._example = task.payload["example"]

    @tool
    def try_code(self, code: str) -> str:
        """Try the code on the example.

        Args:
            code: Python that defines solve.
        """
        (found,) = call_function(self._sandbox, code, "solve", [[self._example["xs"]]])
        return verdict(found, self._example["result"])

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        tried = [call.arguments.get("code") for message in messages for call in message.tool_calls]
        if not tried or messages[-1].content != DONE:
            return 0.0
        tests = task.payload["tests"]
        found = call_function(self._sandbox, str(tried[-1]), "solve", [[test["xs"]] for test in tests])
        return float(all(one.equals(test["result"]) for one, test in zip(found, tests, strict=True)))


def verdict(found: Returned, right: Any) -> str:
    """What the policy reads of its try."""
    if found.error is not None:
        return found.error
    return f"{found.value} is {'right' if found.equals(right) else 'wrong'}"
