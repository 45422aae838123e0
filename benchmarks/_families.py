"""The families of tasks on which replay is measured with the pretrained model. Two are of others, with their judges."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Settings = Mapping[str, Any]


class Family(NamedTuple):
    data: Callable[[Path, int], Sequence[Sequence[object]]]
    """Commands that write demonstrations.jsonl, train.jsonl and test.jsonl of a seed into a folder."""
    sft: str
    train: str
    """Files of `agentloop sft` and `agentloop train`."""
    training: Settings
    """Over the second file."""
    level: float
    """A run has reached it once its newest 256 fresh episodes, all of new tasks, succeed as often."""
    first: int
    """The success of so many first fresh episodes is shown, and runs that only tune end with them."""
    ends_at_level: bool
    """False: every run has as many episodes, and its policy is evaluated in the end."""
    found: tuple[int, float]
    """Epochs and learning rate that the control was tuned to, and every arm has."""
    autocast: str = "bfloat16"
    """`none` where a CPU has no such products, and takes many times as long for them."""


def _calculator(data: Path, seed: int) -> Sequence[Sequence[object]]:
    careless = ("--tasks", 4000, "--careless", 0.85)  # one episode in five succeeds at the start
    return [("examples.calculator_agent.make_data", data, "--seed", seed, *careless)]


def _games(data: Path, seed: int) -> Sequence[Sequence[object]]:
    """Walkthroughs are of games of two commands. The run's games take three, so that few are won at first."""
    places = ("--set", f"tasks.data={data}/{{split}}.jsonl", "--set", f"sft.data={data}/demonstrations.jsonl")
    both = ("examples.benchmarks.textworld_data", _TEXTWORLD, "--first", 1000 * seed, "--held-out", 1, *places)
    sizes = [word for key, value in _GAMES.items() for word in ("--set", f"{key}={value}")]
    return [(*both, "--train", 24, "--demonstrations", 24), (*both, "--train", 192, "--demonstrations", 0, *sizes)]


def _calls(data: Path, seed: int) -> Sequence[Sequence[object]]:
    return [("examples.benchmarks.bfcl_rows", data, "simple_python", "--demonstrations", 64, "--order", seed)]


_TEXTWORLD, _BFCL = "examples/benchmarks/textworld.yaml", "examples/benchmarks/bfcl.yaml"
_GAMES = {"environment.options.objects": 4, "environment.options.quest_length": 3}
FAMILIES = {
    "calculator": Family(
        data=_calculator,
        sft="examples/calculator_agent/sft.yaml",
        train="examples/calculator_agent/train.yaml",
        training={"loss.replay.objective.dual_clip": None},  # what its first seeds had
        level=0.5,
        first=512,
        ends_at_level=False,
        found=(2, 2e-5),
    ),
    "textworld": Family(
        data=_games,
        sft=_TEXTWORLD,
        train=_TEXTWORLD,
        training={**_GAMES, "batch.group_size": 4},
        level=0.5,
        first=256,
        ends_at_level=True,
        found=(2, 4e-5),
    ),
    "bfcl": Family(
        data=_calls,
        sft=_BFCL,
        train=_BFCL,
        training={"batch.group_size": 4, "tasks.shuffle": False},  # demonstrations are of the last rows
        level=0.35,
        first=512,
        ends_at_level=True,
        found=(2, 1e-5),
    ),
}
