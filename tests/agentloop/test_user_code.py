"""Whatever code of the user's raises is that code's error, in one line with its place; the run's own stop is not."""

import asyncio
import math
import os
import pickle
import random
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from agentloop.config import RunConfig
from agentloop.config.sections.reward import RewardSection
from agentloop.config.sections.rollout import RolloutSection
from agentloop.environments import EnvironmentFactory, Task, call_tool, load_environment
from agentloop.environments.tools.results import ToolResult
from agentloop.environments.tools.tool_schema import tools_of
from agentloop.environments.tools.worker_threads import WorkerThreads
from agentloop.errors import RunStop, UserError
from agentloop.learning.stream_losses import stream_losses
from agentloop.rollouts.actors import make_parser
from agentloop.rollouts.demonstrated import demonstrate
from agentloop.rollouts.episodes.episode import Episode, EpisodeHooks
from agentloop.rollouts.rewards import RewardScorer
from agentloop.runs.sinks import MetricSinks
from agentloop.training.advantage_estimator import AdvantageEstimator
from agentloop.training.components import load_redactor
from agentloop.user_code import load_class, load_function, load_sampler, users_code
from context.messages import Message, ToolCall
from replay.records import StopReason
from replay.sampling.samplers import Rows
from tests.fakes.refusals import refusal_of

SOURCE = '''
import asyncio
from agentloop import Achieved, Environment, Message, Task, tool
from replay import Sampler

def fail(*_, **__):
    raise {error}

async def fail_later(episode):
    await asyncio.sleep(0)
    raise {error}

class Mine(Environment):
    def __init__(self, made: bool = True) -> None:
        made or fail()

    def make_task(self, rng):
        return fail() if rng is None else Task("Say something.", {{"fails": ""}})

    def task_from_row(self, row):
        return fail() if row == {{"fails": True}} else Task("Say something.", {{"fails": ""}})

    def start(self, task):
        task.payload["fails"] == "start" and fail()

    def reward(self, task, messages):
        return fail() if task.payload["fails"] == "reward" else 1.0

    def close(self):
        Mine.closes or fail()

    closes = True
    turn_rewards = achieved = demonstrate = fail

    @tool
    def act(self, what: str) -> str:
        """Act."""
        fail()

    @tool
    async def act_later(self, what: str) -> str:
        """Act."""
        await fail_later(None)

class Waiting(Mine):
    async def start(self, task):
        task.payload["fails"] == "start" and await fail_later(None)

    async def reward(self, task, messages):
        return await fail_later(None) if task.payload["fails"] == "reward" else 1.0

class Weighing(Sampler):
    def weights(self, rows):
        return rows.reward if len(rows) < 3 else fail()

class Parser:
    parse = staticmethod(fail)

class Sink:
    log = close = fail
'''
RAISED = {
    "ValueError('no')": "ValueError: no",
    "SystemExit(0)": "SystemExit: 0",
    "KeyboardInterrupt": "KeyboardInterrupt",
    "StopIteration": "",  # which no coroutine can raise: Python makes a RuntimeError of it
    "asyncio.CancelledError": "CancelledError",
    "TimeoutError('theirs')": "TimeoutError: theirs",
}
MESSAGES = (Message("user", "Say something."), Message("assistant", "x", author="llm"))


@pytest.fixture(params=RAISED)
def raised(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def file(tmp_path: Path, raised: str) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE.format(error=raised))
    return path


def factory_of(file: Path, name: str = "Mine", **options: Any) -> EnvironmentFactory:
    return load_environment(f"{file}:{name}", options)


def task(fails: str) -> Task:
    return Task("Say something.", {"fails": fails})


EPISODE = Episode.answered(task(""), MESSAGES, 0.0)


async def hook(file: Path, name: str, method: str) -> None:
    threads = WorkerThreads(1)
    hooks = EpisodeHooks(factory_of(file, name).create(), task(method), threads, RolloutSection())
    await hooks.start()
    await hooks.reward(MESSAGES, StopReason.ANSWERED)


def scorer(file: Path, name: str, **section: Any) -> RewardScorer:
    given = {"functions": [{"function": f"{file}:{name}"}], "timeout_s": 20.0, **section}
    return RewardScorer(RewardSection.model_validate(given))


def of_file(file: Path) -> object:
    file.write_text(file.read_text() + "\nfail()\n")
    return load_class(f"{file}:Mine", what="environment.name")


def drawn(file: Path) -> object:
    sampler = load_sampler(f"{file}:Weighing", 0, {})
    columns = {"reward": [0.0] * 3, "own": [True] * 3}
    return sampler.weigh(Rows(columns, slice(0, 3), None))  # type: ignore[arg-type]


def objective_of(file: Path) -> object:
    config = RunConfig.model_validate({"loss": {"fresh": {"objective": f"{file}:fail"}}})
    return stream_losses(config.loss)["fresh"].objective(None)  # type: ignore[arg-type]


HOOKS: dict[str, Callable[[Path], object]] = {
    "environment.name must name a file that can be imported": of_file,
    "environment.options must be accepted by": lambda file: factory_of(file, made=False),
    "make_task must make a task": lambda file: factory_of(file).make_task(None),  # type: ignore[arg-type]
    "task_from_row must read every row": lambda file: factory_of(file).task_from_row({"fails": True}, "row 7"),
    **{
        f"{name}.{rule}": lambda file, name=name, rule=rule: asyncio.run(hook(file, name, rule.partition(" ")[0]))
        for name in ("Mine", "Waiting")
        for rule in ("start must accept its tasks", "reward must return a number")
    },
    "Mine.reward must judge any reply": lambda file: factory_of(file).reward(task("reward"), MESSAGES),
    "turn_rewards must return a list": lambda file: factory_of(file).turn_rewards(task(""), MESSAGES, replies=1),
    "achieved must return a list of Achieved": lambda file: factory_of(file).achieved(task(""), MESSAGES),
    "demonstrate must bring its episodes to an answer": lambda file: demonstrate(
        factory_of(file), factory_of(file).create(), task(""), random.Random(0)
    ),
    "reward.functions must return a finite number": lambda file: scorer(file, "fail").score([EPISODE]),
    "reward.functions must": lambda file: scorer(file, "fail_later").score([EPISODE]),
    "advantage.function must take the members": lambda file: AdvantageEstimator(
        RunConfig.model_validate({"advantage": {"function": f"{file}:fail"}})
    ),
    "objective (fail) must take an ObjectiveInput": objective_of,
    "replay.sampler must be a sampler that weighs rows": drawn,
    "context.parser must read any reply": lambda file: make_parser(f"{file}:Parser", "").parse("x", stopped=True),  # type: ignore[arg-type]
    "replay.redact must take every trajectory": lambda file: load_redactor(f"{file}:fail")(MESSAGES),
}


@pytest.mark.parametrize("rule", HOOKS)
def test_hook_that_raises_anything_is_one_line_with_its_place(rule: str, file: Path, raised: str) -> None:
    said = refusal_of(HOOKS[rule], file)
    assert rule in said
    assert re.search(rf"got .*{re.escape(RAISED[raised])}.*mine\.py:\d+", said)


def called(file: Path, name: str) -> ToolResult:
    async def call() -> ToolResult:
        environment = factory_of(file).create()
        asked, tools = ToolCall(name, {"what": "x"}), tools_of(type(environment))
        return await call_tool(environment, tools, asked, limits=RolloutSection(), threads=WorkerThreads(1))

    return asyncio.run(call())


def test_tools_dropped_rewards_sinks_and_closes_that_raise_cost_themselves_alone(file: Path, raised: str) -> None:
    for name in ("act", "act_later"):
        result = called(file, name)
        assert result.error_kind == "raised"
        assert re.search(rf"{re.escape(RAISED[raised])}.*mine\.py:\d+", str(result.problem))
    for name in ("fail", "fail_later"):
        scores = scorer(file, name, on_error="drop").score([EPISODE])
        assert math.isnan(scores.totals[0])
        assert RAISED[raised] in scores.problems[0]
    said: list[str] = []
    sinks = MetricSinks({"mine": load_class(f"{file}:Sink", what="metrics.sinks")()}, said.append)
    sinks.log(1, {})
    sinks.close()
    assert said[0].startswith(f"metrics sink mine failed: {RAISED[raised]}")
    assert len(said) == 1

    async def closed() -> str | None:
        factory = factory_of(file)
        factory.environment.closes = False  # type: ignore[attr-defined]
        hooks = EpisodeHooks(factory.create(), task(""), WorkerThreads(1), RolloutSection())
        await hooks.start()
        return await hooks.close()

    assert str(asyncio.run(closed())).startswith(RAISED[raised])


# What is no failure of the user's code


def test_task_that_is_cancelled_ends_cancelled_and_the_stop_of_the_run_passes() -> None:
    for error in (RunStop(130), UserError("engine must answer, got none.")):
        with pytest.raises(type(error)) as caught, users_code():
            raise error
        assert caught.value is error

    async def cancelled() -> bool:
        async def call() -> None:
            with users_code():
                await asyncio.Event().wait()

        calling = asyncio.ensure_future(call())
        await asyncio.sleep(0)
        calling.cancel()
        await asyncio.wait([calling])
        return calling.cancelled()

    assert asyncio.run(cancelled())


# Files


def write_judge(folder: Path, value: float) -> str:
    folder.mkdir()
    (folder / "judge.py").write_text(f"def score(episode):\n    return {value}\n")
    return f"{folder / 'judge.py'}:score"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_functions_of_files_can_be_sent_to_processes_and_are_not_confused(tmp_path: Path, method: str) -> None:
    specs = [write_judge(tmp_path / name, value) for name, value in (("a.b", 1.0), ("c d", 2.0))]
    functions = [load_function(spec, what="reward.functions") for spec in specs]
    with ProcessPoolExecutor(1, mp_context=get_context(method)) as pool:
        assert [pool.submit(function, None).result() for function in functions] == [1.0, 2.0]


def test_file_edited_within_a_second_is_run_as_it_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    spec = write_judge(tmp_path / "mine", 1.0)
    first = load_function(spec, what="reward.functions")
    assert load_function(spec, what="tools") is first and pickle.loads(pickle.dumps(first)) is first  # noqa: S301
    assert first(None) == 1.0
    file, times = tmp_path / "mine" / "judge.py", os.stat(tmp_path / "mine" / "judge.py")
    file.write_text(file.read_text().replace("1.0", "2.0"))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert load_function(spec, what="reward.functions")(None) == 2.0


@pytest.mark.parametrize("name", ["context", "replay"])
def test_file_of_ones_own_that_is_named_like_a_package_is_one_clear_line(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("hint = 1")
    (tmp_path / "right.py").write_text(f"from {name} import hint\ndef right(episode):\n    return hint\n")
    with pytest.raises(UserError, match=rf"imports {name}: a package of agentloop, which hides .*{name}\.py\. Rename"):
        load_function(f"{tmp_path / 'right.py'}:right", what="reward.functions")
    imported = subprocess.run([sys.executable, "-c", "import agentloop"], cwd=tmp_path, capture_output=True, text=True)
    last = imported.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {name} must be the package that comes with agentloop, got {tmp_path}")
