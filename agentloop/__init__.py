"""Experience replay for training tool-using language-model agents.

The public names are imported on first use: `from agentloop import Environment` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentloop.config import RunConfig
    from agentloop.config.config_file import load_config
    from agentloop.environments import Achieved, Environment, Observation, ScriptedUser, SimulatedUser, Task, tool
    from agentloop.errors import NotJudged, RunStop, TrainingStopped, UserError
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
    "agentloop.errors": ("NotJudged", "RunStop", "TrainingStopped", "UserError"),
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
    "TrainResult",
    "TrainingStopped",
    "UserError",
    "load_config",
    "tool",
    "train",
]

for _name in ("context", "replay"):
    _spec = find_spec(_name)
    _folders = getattr(_spec, "submodule_search_locations", None) or [None]
    _place = getattr(_spec, "origin", None) or next(iter(_folders))  # a folder without __init__.py has no origin
    if _place is None or Path(_place).parents[1] != Path(__file__).parents[1]:
        raise ImportError(f"{_name} must be the package that comes with agentloop, got {_place}. Rename yours.")


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'agentloop' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
