"""Runs Python that a policy wrote where it can reach nothing: for tools, and for rewards that try code out."""

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
