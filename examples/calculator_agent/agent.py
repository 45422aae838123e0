"""An agent that solves word problems with a calculator."""

import ast
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentloop import Environment, Message, Task, tool

SYSTEM_PROMPT = "Solve the problem with the calculator, then answer with the number alone."
SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class CalculatorAgent(Environment):
    """Reward 1 if the last number of the answer is the right one and the calculator was used, else 0."""

    def task_from_row(self, row: Mapping[str, Any]) -> Task:
        return Task((Message("system", SYSTEM_PROMPT), Message("user", row["problem"])), row)

    @tool
    def calculate(self, expression: str) -> str:
        """Calculate with numbers, + - * / and brackets.

        Args:
            expression: What to calculate, such as (12 + 7) * 3.
        """
        return f"{_value(ast.parse(expression.strip(), mode='eval').body):.12g}"

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        used = any(message.tool_calls for message in messages)
        numbers = _NUMBER.findall(messages[-1].content)
        return float(used and bool(numbers) and float(numbers[-1].replace(",", "")) == task.payload["answer"])


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
        return float(SIGNS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError("write numbers, + - * / and brackets alone")
