"""Runs the policy's Python in a sandbox, for tools and for rewards that try code out."""

from agentloop.environments.sandbox.bubblewrap import SandboxLimits
from agentloop.environments.sandbox.python_sandbox import (
    PythonSandbox,
    Returned,
    SandboxedPython,
    SandboxKind,
    SandboxRun,
    call_function,
)

__all__ = [
    "PythonSandbox",
    "Returned",
    "SandboxKind",
    "SandboxLimits",
    "SandboxRun",
    "SandboxedPython",
    "call_function",
]
