"""Adapter to those environments of Gymnasium whose observations and actions can be written as text."""

import random
import re
from collections.abc import Mapping
from typing import Any

from agentloop.environments.adapters.adapter import LARGEST_SEED, WHAT_IT_DOES, Adapter, as_text
from agentloop.environments.environment import Observation, Task
from agentloop.errors import UserError, needing, one_line

_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_COLOURED = re.compile(r"\x1b\[([0-9;]*)m(.*?)\x1b\[0m", re.DOTALL)


class GymnasiumText(Adapter):
    """Tasks are seeds, and calls of `act` are steps. The policy sees `render`'s text, or else the observation."""

    def __init__(
        self,
        id: str,
        arguments: dict[str, Any] | None = None,
        actions: list[str] | None = None,
        goal: str = "",
        *,
        plain_text: bool = False,
    ) -> None:
        """`arguments` go to `gymnasium.make`, `actions` names the choices in order. For the others see `Adapter`."""
        self.goal, self.plain_text = goal, plain_text
        self._id, self._arguments, self._actions = id, arguments or {}, actions
        self._made: Any = None

    def make_task(self, rng: random.Random) -> Task:
        return self.task_of("seed", rng.randrange(LARGEST_SEED))

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
        self._made = None

    def reset(self, asked: int) -> str:
        self._made = self._make()
        observation, _ = self._made.reset(seed=asked)
        return self._shown(observation)

    def tools_for(self, task: Task) -> list[str | Mapping[str, Any]]:
        made = self._make()
        made.close()
        names = self._names(made)
        action = {"type": "string"} if names is None else {"type": "string", "enum": names}
        fixed = {"type": "object", "required": ["action"], "additionalProperties": False}
        return self.offered("act", {**fixed, "properties": {"action": action}}, WHAT_IT_DOES)

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Observation | str:
        names, action = self._names(self._made), arguments["action"]
        if names is not None and action not in names:
            return f"That is no action. The actions are: {', '.join(names)}."
        action = action if names is None else names.index(action)
        observation, reward, ended, cut_short, _ = self._made.step(action)
        return Observation(self._shown(observation), float(reward), over=bool(ended or cut_short))

    def _shown(self, observation: Any) -> str:
        if self._made.render_mode != "ansi":
            return as_text(observation)
        # Colours mark the player's place: in FrozenLake the letter there is red.
        return _COLOURED.sub(_with_colour, self._made.render()).strip("\n")

    def _names(self, made: Any) -> list[str] | None:
        """Return the names of the actions; None where actions are free texts."""
        from gymnasium import spaces

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
        # Imported here, because Gymnasium is optional and slow to import.
        with needing("gymnasium", "environment.name: gymnasium"):
            import gymnasium
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


def _with_colour(drawn: re.Match[str]) -> str:
    codes = [int(code) % 10 for code in drawn[1].split(";") if code.isdecimal() and 30 <= int(code) < 48]
    return f"{drawn[2]}({_COLOURS[codes[-1] % 8]})" if codes else drawn[2]
