"""Plays those environments of Gymnasium whose observations and actions can be written as text.

Copy this file, or name it as it is: `environment.name: examples/adapters/gymnasium_text.py:GymnasiumText`. It needs
`pip install gymnasium`, and was tried with Gymnasium 1.4.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium import spaces

from agentloop import Environment, Message, Observation, Task
from agentloop.environments.tools.tool_schema import tools_of
from agentloop.errors import UserError, one_line

LARGEST_SEED = 2**31 - 1
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_COLOURED = re.compile(r"\x1b\[([0-9;]*)m(.*?)\x1b\[0m", re.DOTALL)


class GymnasiumText(Environment):
    """Tasks are seeds, and calls of `act` are steps. The policy sees `render`'s text, or else the observation."""

    version = "2"

    def __init__(
        self,
        id: str,
        arguments: dict[str, Any] | None = None,
        actions: list[str] | None = None,
        goal: str = "",
        *,
        plain_text: bool = False,
    ) -> None:
        """`arguments` go to `gymnasium.make`, `actions` names the choices in order, and `goal` opens the prompt.

        With `plain_text` a reply is an action, and there is no tool.
        """
        self._goal, self._plain_text = goal, plain_text
        self._id, self._arguments, self._actions = id, arguments or {}, actions
        self._made: Any = None

    def make_task(self, rng: random.Random) -> Task:
        seed = rng.randrange(LARGEST_SEED)
        try:
            return Task(f"{self._goal}\n\n{self._reset(seed)}".strip(), {"seed": seed})
        finally:
            self.close()

    def start(self, task: Task) -> None:
        self._reset(task.payload["seed"])

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
        self._made = None

    def tools_for(self, task: Task) -> list[str | Mapping[str, Any]]:
        own = list(tools_of(type(self)))  # those of MCP servers, if there are any
        made = self._make()
        made.close()
        names = self._names(made)
        if self._plain_text:
            return own
        action = {"type": "string"} if names is None else {"type": "string", "enum": names}
        fixed = {"type": "object", "required": ["action"], "additionalProperties": False}
        parameters = {**fixed, "properties": {"action": action}}
        function = {"name": "act", "description": "Act, and see what follows.", "parameters": parameters}
        return [*own, {"type": "function", "function": function}]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Observation | str:
        names, action = self._names(self._made), arguments["action"]
        if names is not None and action not in names:
            return f"That is no action. The actions are: {', '.join(names)}."
        action = action if names is None else names.index(action)
        observation, reward, ended, cut_short, _ = self._made.step(action)
        return Observation(self._shown(observation), float(reward), over=bool(ended or cut_short))

    def respond(self, task: Task, messages: Sequence[Message]) -> Observation | str | None:
        return self.call_tool("act", {"action": messages[-1].content.strip()}) if self._plain_text else None

    def _reset(self, seed: int) -> str:
        self._made = self._make()
        observation, _ = self._made.reset(seed=seed)
        return self._shown(observation)

    def _shown(self, observation: Any) -> str:
        if self._made.render_mode != "ansi":
            plain = isinstance(observation, str)
            return observation if plain else json.dumps(observation, ensure_ascii=False, default=_plain)
        # Colours mark the player's place: in FrozenLake the letter there is red.
        return _COLOURED.sub(_with_colour, self._made.render()).strip("\n")

    def _names(self, made: Any) -> list[str] | None:
        """Return the names of the actions; None where actions are free texts."""
        space = made.action_space
        if isinstance(space, spaces.Text):
            return None
        if not isinstance(space, spaces.Discrete):
            raise UserError(
                f"environment.options.id must be an environment of Gymnasium with actions of Discrete or Text, got "
                f"{self._id!r} with {type(space).__name__}. Wrap it."
            )
        names = [str(number) for number in range(int(space.n))] if self._actions is None else self._actions
        if len(set(names)) != space.n or int(space.start) != 0:
            raise UserError(
                f"environment.options.actions must have a name of its own for each of {space.n} actions of "
                f"{self._id!r} from 0, got {names}."
            )
        return names

    def _make(self) -> Any:
        try:
            plain = gymnasium.make(self._id, **self._arguments)
            if "ansi" not in plain.metadata.get("render_modes", ()):
                return plain
            plain.close()
            return gymnasium.make(self._id, **{"render_mode": "ansi", **self._arguments})
        except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
            raise UserError(
                f"environment.options.id must name an environment that Gymnasium can make, got {self._id!r} with "
                f"{one_line(error)}."
            ) from error


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays and numbers of NumPy
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else str(value)


def _with_colour(drawn: re.Match[str]) -> str:
    codes = [int(code) % 10 for code in drawn[1].split(";") if code.isdecimal() and 30 <= int(code) < 48]
    return f"{drawn[2]}({_COLOURS[codes[-1] % 8]})" if codes else drawn[2]
