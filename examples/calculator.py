from agentloop import Environment, Task, tool


class Calculator(Environment):
    def make_task(self, rng):
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        return Task(f"What is {a} times {b}? Answer with the number alone.", {"answer": str(a * b)})

    @tool
    def multiply(self, a: int, b: int) -> int:
        """Multiply two whole numbers.

        Args:
            a: The first one.
            b: The second one.
        """
        return a * b

    def reward(self, task, messages):
        return float(messages[-1].content.strip() == task.payload["answer"])
