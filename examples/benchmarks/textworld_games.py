"""Text games of TextWorld: rooms, doors, boxes and things, made from a seed. See docs/benchmarks-of-others.md.

A reply's last line is the command, or the tool `act` is called with it. Games are made by `pip install textworld`.
"""

import json
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import textworld
from textworld.version import __version__ as textworld_version

from agentloop import Environment, Message, Observation, Task, ToolCall, tool

ONE_COMMAND = "You play a text game. Reply with one command alone."
ONE_CALL = "You play a text game. Call act with one command at a time."
NO_COMMAND = "That is no command of this game."
_VERBS = "close|drop|eat|examine|get|go|insert|inventory|lock|look|open|put|take|unlock|wait"
# No full stop, comma or `then`: they would join commands. `save` and `script` write files, `restart` forgets the score.
_COMMAND = re.compile(rf"(?=.{{1,100}}$)(?:{_VERBS})(?: (?!then\b)[a-z0-9'-]+)*", re.IGNORECASE)
_AFTER = re.compile(r"\n*(?:>|\*\*\* The End \*\*\*).*", re.DOTALL)
_INFOS = textworld.EnvInfos(
    **dict.fromkeys(("objective", "description", "feedback", "score", "max_score", "won", "lost"), True),
    **dict.fromkeys(("admissible_commands", "policy_commands"), True),
)
_MAKING = threading.Lock()
warnings.filterwarnings("ignore", message="Game '.*' is not fully supported")  # jericho, of any game it does not know


class TextWorldGames(Environment):
    """The score's share of the highest score is the reward at every end; 1 is a game that is won."""

    rewards_every_end = True

    def __init__(
        self,
        rooms: int = 2,
        objects: int = 4,
        quests: int = 2,
        quest_length: int = 2,
        *,
        seeds: int = 1000,
        as_tool: bool = False,
        show_commands: bool = False,
        folder: str = "runs/textworld/games",
    ) -> None:
        """Each of the `quests` takes up to `quest_length` commands, and is worth one point.

        Tasks without rows take a seed below `seeds`. `as_tool` offers the tool `act` in place of replies in plain
        text. `show_commands` lists the commands that the game would take after each text. `folder` keeps the games.
        """
        self._sizes = {"rooms": rooms, "objects": objects, "quests": quests, "length": quest_length}
        self._seeds, self._as_tool, self._shows, self._folder = seeds, as_tool, show_commands, Path(folder)
        self._game: Any = None
        self.state: Any = None
        """What the game itself says about this episode: `score`, `max_score`, `won`, `lost` and others."""

    def make_task(self, rng: Random) -> Task:
        return self.task_from_row({"seed": rng.randrange(self._seeds)})

    def task_from_row(self, row: Mapping[str, Any]) -> Task:
        opening = json.loads((self._made(row["seed"]) / "opening.json").read_text())
        system = Message("system", ONE_CALL if self._as_tool else ONE_COMMAND)
        shown = f"{opening['objective']}\n\n{opening['description']}{self._listed(opening['commands'])}"
        return Task((system, Message("user", shown)), {"seed": row["seed"], "most": opening["most"]})

    def tools_for(self, task: Task) -> list[str]:
        return ["act"] if self._as_tool else []

    def start(self, task: Task) -> None:
        self._game = textworld.start(str(self._made(task.payload["seed"]) / "game.z8"), _INFOS)
        self.state = self._game.reset()

    def close(self) -> None:
        if self._game is not None:
            self._game.close()

    @tool
    def act(self, command: str) -> Observation:
        """Give the game one command, and read what follows.

        Args:
            command: A verb and what it is about, such as: open box
        """
        return self._step(command)

    def respond(self, task: Task, messages: Sequence[Message]) -> Observation | None:
        """Take the last line of a reply as the command. With a tool, a reply without a call gives up."""
        return None if self._as_tool else self._step((messages[-1].content.strip().splitlines() or [""])[-1])

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return float(self.state.score / self.state.max_score)

    def demonstrate(self, task: Task, messages: Sequence[Message], rng: Random) -> Message:
        """Give the next command of the walkthrough from where the game stands."""
        command = self.state.policy_commands[0]
        if not self._as_tool:
            return Message("assistant", command)
        return Message("assistant", "", tool_calls=(ToolCall("act", {"command": command}),))

    def _step(self, line: str) -> Observation:
        command = " ".join(line.split())
        if not _COMMAND.fullmatch(command):
            return Observation(NO_COMMAND + self._listed(self.state.admissible_commands), reward=0.0)
        before = self.state.score
        self.state, _, over = self._game.step(command)
        text = _plain(self.state.feedback) + ("" if over else self._listed(self.state.admissible_commands))
        return Observation(text, reward=(self.state.score - before) / self.state.max_score, over=over)

    def _listed(self, commands: Sequence[str]) -> str:
        return f"\n\nYou can: {', '.join(commands)}" if self._shows else ""

    def _made(self, seed: int) -> Path:
        """Return the folder of a game, which is made once, by whichever episode or process is first."""
        name = "-".join(f"{key}{value}" for key, value in {**self._sizes, "seed": seed}.items())
        target = self._folder / textworld_version / name
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            with _MAKING, tempfile.TemporaryDirectory(dir=target.parent) as made:
                if not target.is_dir():
                    self._make(Path(made) / "game", seed)
                    with suppress(OSError):  # another process was first: its game is the same
                        os.rename(Path(made) / "game", target)
        return target

    def _make(self, folder: Path, seed: int) -> None:
        """Make a game and what its task shows. The game's folder is whole once it has its own name."""
        folder.mkdir()
        options = textworld.GameOptions()
        options.nb_rooms, options.nb_objects = self._sizes["rooms"], self._sizes["objects"]
        options.nb_parallel_quests, options.quest_length = self._sizes["quests"], self._sizes["length"]
        options.seeds, options.path = seed, str(folder / "game.z8")
        textworld.make(options)
        game = textworld.start(options.path, _INFOS)
        state = game.reset()
        opening = {
            "objective": state.objective,
            "description": _plain(state.description),
            "commands": state.admissible_commands,
            "most": state.max_score,
        }
        (folder / "opening.json").write_text(json.dumps(opening))
        game.close()


def _plain(text: str) -> str:
    """Leave out the line for the next command, the banner of the end, and empty lines."""
    return re.sub(r"\n{2,}", "\n", _AFTER.sub("", text).strip())
