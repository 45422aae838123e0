"""Runs Python that a policy wrote where it can reach nothing: for tools, and for rewards that try code out."""

from agentloop.environments.sandbox.function_calls import Returned, call_function
from agentloop.environments.sandbox.python_sandbox import PythonSandbox, SandboxKind
from agentloop.environments.sandbox.sandbox_run import SandboxFailed, SandboxLimits, SandboxRun
from agentloop.environments.sandbox.sandboxed_python import SandboxedPython

__all__ = [
    "PythonSandbox",
    "Returned",
    "SandboxFailed",
    "SandboxKind",
    "SandboxLimits",
    "SandboxRun",
    "SandboxedPython",
    "call_function",
]
