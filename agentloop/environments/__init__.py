"""Where the agent acts: environments with tasks, tools and rewards."""

from agentloop.environments.environment import Achieved, Environment, Observation, Task, tool
from agentloop.environments.factory import EnvironmentFactory, load_environment, makes_tasks
from agentloop.environments.lookup_chain import LookupChain
from agentloop.environments.run_environments import RunEnvironments, load_environments, open_tasks
from agentloop.environments.simulated_user import ScriptedUser, SimulatedUser
from agentloop.environments.task_source import TaskSource
from agentloop.environments.tools.call import POLICY_ERRORS, call_demonstrated, call_tool
from agentloop.environments.tools.results import ToolResult

__all__ = [
    "POLICY_ERRORS",
    "RunEnvironments",
    "Achieved",
    "Environment",
    "EnvironmentFactory",
    "LookupChain",
    "Observation",
    "ScriptedUser",
    "SimulatedUser",
    "Task",
    "TaskSource",
    "ToolResult",
    "call_demonstrated",
    "call_tool",
    "load_environment",
    "load_environments",
    "makes_tasks",
    "open_tasks",
    "tool",
]
