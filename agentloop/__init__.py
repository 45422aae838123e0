"""Experience replay for training tool-using language-model agents.

The public names are imported on first use: `from agentloop import Environment` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentloop.config import RunConfig
    from agentloop.config.config_file import load_config
    from agentloop.environments import Achieved, Environment, Task, tool
    from agentloop.training.from_python import train
    from agentloop.training.train import TrainResult
    from context.messages import Message, ToolCall

_HOMES = {
    "Achieved": "agentloop.environments",
    "Environment": "agentloop.environments",
    "Message": "context.messages",
    "Task": "agentloop.environments",
    "ToolCall": "context.messages",
    "tool": "agentloop.environments",
    "RunConfig": "agentloop.config",
    "load_config": "agentloop.config.config_file",
    "TrainResult": "agentloop.training.from_python",
    "train": "agentloop.training.from_python",
}

__all__ = [
    "Achieved",
    "Environment",
    "Message",
    "RunConfig",
    "Task",
    "ToolCall",
    "TrainResult",
    "load_config",
    "tool",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'agentloop' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
