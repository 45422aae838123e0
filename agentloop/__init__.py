"""Experience replay for training tool-using language-model agents.

The public names are imported on first use: `from agentloop import Environment` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentloop.config import RunConfig
    from agentloop.config.config_file import load_config
    from agentloop.environments import Achieved, Environment, Observation, ScriptedUser, SimulatedUser, Task, tool
    from agentloop.errors import NotJudged, RunStop, ToolTimeout, TrainingStopped, UserError
    from agentloop.training.from_python import train
    from agentloop.training.train_result import TrainResult
    from context.messages import Message, ToolCall

_NAMES = {
    "agentloop.config": ("RunConfig",),
    "agentloop.config.config_file": ("load_config",),
    "agentloop.environments": (
        "Achieved",
        "Environment",
        "Observation",
        "ScriptedUser",
        "SimulatedUser",
        "Task",
        "tool",
    ),
    "agentloop.errors": ("NotJudged", "RunStop", "ToolTimeout", "TrainingStopped", "UserError"),
    "agentloop.training.from_python": ("TrainResult", "train"),
    "context.messages": ("Message", "ToolCall"),
}

__all__ = [
    "Achieved",
    "Environment",
    "Message",
    "NotJudged",
    "Observation",
    "RunConfig",
    "RunStop",
    "ScriptedUser",
    "SimulatedUser",
    "Task",
    "ToolCall",
    "ToolTimeout",
    "TrainResult",
    "TrainingStopped",
    "UserError",
    "load_config",
    "tool",
    "train",
]


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'agentloop' has no attribute {name!r}")
