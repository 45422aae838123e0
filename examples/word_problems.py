import re
from typing import Literal

from agentloop import Environment, Task, tool


class WordProblems(Environment):
    def task_from_row(self, row):
        return Task(row["question"] + " Answer with the number alone.", {"answer": str(row["answer"])})

    @tool
    def calculate(self, a: int, operation: Literal["+", "-", "*"], b: int) -> int:
        """Calculate with two whole numbers."""
        return {"+": a + b, "-": a - b, "*": a * b}[operation]

    def reward(self, task, messages):
        numbers = re.findall(r"-?\d+", messages[-1].content)
        return float(numbers[-1:] == [task.payload["answer"]])
