from agentloop import Task
from agentloop.environments.sandbox import SandboxedPython


class Squares(SandboxedPython):
    def make_task(self, rng):
        number = rng.randint(2, 99)
        return Task(f"Write a Python program that prints the square of {number}. Answer with it alone.", {"of": number})

    def reward(self, task, messages):
        run = self.sandbox.run(messages[-1].content)
        return float(run.output == f"{task.payload['of'] ** 2}\n")
