"""A tool that runs the policy's Python, ready for an environment of one's own."""

from __future__ import annotations

from agentloop.environments.environment import Environment, tool
from agentloop.environments.sandbox.python_sandbox import PythonSandbox, SandboxKind
from agentloop.environments.sandbox.sandbox_run import SandboxLimits


class SandboxedPython(Environment):
    """Offers `run_python`; derive from it, and add tasks and rewards, which may run programs in `self.sandbox` too.

    `environment.options` takes `sandbox` and `limits`, as in {sandbox: bubblewrap, limits: {seconds: 2}}.
    """

    def __init__(self, *, sandbox: SandboxKind = "bubblewrap", limits: SandboxLimits | None = None) -> None:
        self.sandbox = PythonSandbox(sandbox, limits)

    @tool
    def run_python(self, code: str) -> str:
        """Run a Python program and see what it prints.

        Args:
            code: The whole program; each call starts a new one.
        """
        return self.sandbox.run(code).observation()
