"""Where the agent acts: environments with tasks, tools and rewards."""

from agentloop.environments.base import Environment, Task, tool
from agentloop.environments.load import EnvironmentFactory, load_environment
from agentloop.environments.lookup_chain import LookupChain
from agentloop.environments.observations import ToolResult
from agentloop.environments.tasks import TaskSource, open_tasks
from agentloop.environments.tools import POLICY_ERRORS, ToolLimits, call_tool

__all__ = [
    "POLICY_ERRORS",
    "Environment",
    "EnvironmentFactory",
    "LookupChain",
    "Task",
    "TaskSource",
    "ToolLimits",
    "ToolResult",
    "call_tool",
    "load_environment",
    "open_tasks",
    "tool",
]
