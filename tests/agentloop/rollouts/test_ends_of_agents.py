"""The ends of agents that use no client library, and the episodes that follow."""

import asyncio
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agentloop.environments import Task, load_environment
from agentloop.environments.row_environment import AgentEnvironment
from agentloop.environments.tools.worker_threads import WorkerThreads
from agentloop.errors import TrainingStopped
from agentloop.rollouts.episodes.agent_episode import NO_REWARD
from agentloop.rollouts.episodes.agent_program import AgentAddress, AgentEnd, run_agent
from context import Message
from tests.agentloop.rollouts.collecting import collect
from tests.fakes.agents import asking
from tests.fakes.agents.played import ROW, Policy, play
from tests.fakes.processes import processes, stat, until
from tests.fakes.scripted import scripted_actors
from tests.fakes.tiny_actors import run_config


@pytest.mark.parametrize(("agent", "tasks"), [("solve", 1), ("one_of_two", 2)], ids=["at once", "gathered"])
def test_an_engine_that_can_not_go_on_ends_the_run_and_not_an_episode(agent: str, tasks: int) -> None:
    def says(prompt: str) -> str:
        raise TrainingStopped("log-probs must be numbers, got NaN")

    with pytest.raises(TrainingStopped, match="got NaN"):
        play(f"{asking.__file__}:{agent}", says, tasks=tasks, episode_timeout_s=10.0)


def run(agent: str, *, timeout_s: float = 60.0) -> AgentEnd:
    """Run an agent that sends no request."""
    address, threads = AgentAddress("http://127.0.0.1:1/e/x", "key", ""), WorkerThreads(1)
    return asyncio.run(run_agent(AgentEnvironment(agent), Task((), {}), address, threads, timeout_s=timeout_s))


def is_over(name: str) -> bool:
    """True if no running process has this word in its command."""
    return not processes(lambda one: name.encode() in (one / "cmdline").read_bytes() and stat(one)[0] != "Z")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere what left its process group is not found")
def test_a_daemon_ends_with_its_agent_and_its_hold_on_the_output_is_not_waited_for() -> None:
    end = run("sh -c '(setsid sleep 6171.1 &) ; echo begun'")
    assert (end.problem, end.output) == (None, "begun\n")
    assert is_over("6171.1")


@pytest.mark.slow  # a process that imports torch
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a run that is killed ends nothing")
def test_all_that_an_agent_started_ends_when_the_run_is_killed(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    agent = f"sh -c '(setsid sleep 6172.1 &) ; touch {begun}; sleep 6172.1'"
    called = f"from tests.agentloop.rollouts.test_ends_of_agents import run; run({json.dumps(agent)})"
    with subprocess.Popen([sys.executable, "-c", called]) as program:
        until(begun.exists)
        program.kill()
    until(lambda: is_over("sleep\x006172.1"))


def test_the_exit_code_of_a_program_is_told() -> None:
    assert [run(f"sh -c '{end}'").problem for end in ("exit 3", "kill -9 $$")] == ["exit code 3", "exit code 137"]


SAYS = "import sys; sys.stderr.write('no newline'); print('{}'); sys.stdout.flush(); print('behind', file=sys.stderr)"


@pytest.mark.parametrize(
    ("line", "rewards"),
    [
        ('{"reward": 0.5}', {"": 0.5}),
        ('{"reward": true}', {"": 1.0}),
        ('{"rewards": {"a": 1}}', {"a": 1.0}),
        ('{"score": "1"}', {}),
        ("[]", {}),
        ('{"reward": NaN}', None),
        ('{"reward": null}', None),
        ('{"reward": {"a": 1}}', None),
        ('{"rewards": {"a": null}}', None),
    ],
)
def test_any_last_line_is_a_reward_or_a_problem(line: str, rewards: dict[str, float] | None, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(SAYS.replace("{}", line))
    end = run(f"{sys.executable} -S {tmp_path / 'agent.py'}")
    problem = None if rewards is not None else f"the last line must give finite numbers, got {line}"
    assert (end.rewards, end.problem, end.not_judged) == (rewards or {}, problem, rewards is None)
    assert sorted(end.output) == sorted(f"no newline{line}\nbehind\n")


FUNCTION, PROGRAM = f"{asking.__file__}:solve", f"{sys.executable} -S {asking.__file__}"
AWAY = "(_ for _ in ()).throw(__import__('agentloop').NotJudged('the shop is away'))"


@pytest.mark.parametrize(
    ("agent", "then", "stop_reason", "reward", "problem"),
    [
        (FUNCTION, "True", "answered", 1.0, None),
        (FUNCTION, "__import__('numpy').float32(0.5)", "answered", 0.5, None),
        (FUNCTION, "None", "not_judged", None, NO_REWARD),
        (FUNCTION, AWAY, "not_judged", None, "the shop is away"),
        (FUNCTION, "'1'", "not_judged", None, f"{FUNCTION} must return finite numbers, got '1'"),
        (FUNCTION, "float('nan')", "not_judged", None, f"{FUNCTION} must return finite numbers, got nan"),
        (FUNCTION, "{'': None}", "not_judged", None, f"{FUNCTION} must return finite numbers, got {{'': None}}"),
        (FUNCTION, "1 / 0", "agent_failed", 0.0, "ZeroDivisionError: division by zero at"),
        (FUNCTION, f"(post(reward=0.75), {AWAY})", "answered", 0.75, "the shop is away"),
        (PROGRAM, "exit(75)", "not_judged", None, "exit code 75"),
        (PROGRAM, "exit(3)", "agent_failed", 0.0, "exit code 3"),
        (PROGRAM, "(post(reward=0.75), exit(75))", "answered", 0.75, "exit code 75"),
    ],
)
def test_a_reward_of_0_is_what_somebody_judged(
    agent: str, then: str, stop_reason: str, reward: float | None, problem: str | None
) -> None:
    (episode,), _ = play(agent, lambda prompt: "y", row={"then": then})
    assert (episode.stop_reason, episode.failed) == (stop_reason, reward is None)
    assert math.isnan(episode.environment_reward) if reward is None else episode.environment_reward == reward
    assert (episode.problem is None) if problem is None else problem in str(episode.problem)


def test_what_nobody_judged_leaves_its_group_and_is_counted() -> None:
    factory = load_environment("agent", {"agent": FUNCTION}, row=ROW)
    actors = replace(scripted_actors(factory, []), generator=Policy(lambda prompt: "y"))
    ends = ["1.0", AWAY, "float('nan')", "1.0", "0.0", "1.0", "1 / 0", "1.0"]
    each = Task((Message("user", "x"),), {**ROW, "then": f"eval({ends!r}[next(LOOKS)])"})
    found = collect(actors, [(each, 8)], run_config(rollout={"parallel": 1}))
    assert (len(found.trajectories), found.not_judged, found.engine_failures) == (6, 2, 0)
    assert found.metrics()["rollout/not_judged"] == 2
    assert [row.record.reward for row in found.trajectories] == [1.0, 1.0, 0.0, 1.0, 0.0, 1.0]


def test_an_agent_that_its_engine_failed_does_not_count_against_the_policy() -> None:
    replies = iter(["y", None])
    (episode,), _ = play(FUNCTION, lambda prompt: next(replies), row={"then": "ask()"})
    assert (episode.stop_reason, episode.num_turns, episode.problem) == ("engine_failure", 1, "HTTP 500")
    assert math.isnan(episode.environment_reward)


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["{0}:solve", f"{sys.executable} -S {{0}}"], ids=["function", "program"])
@pytest.mark.parametrize(
    ("then", "stop_reason", "reward"),
    [("hang()", "overtime", 0.0), ("(post(reward=0.75), hang())", "answered", 0.75)],
    ids=["says nothing", "posts a reward"],
)
def test_overtime_leaves_an_agent_the_reward_it_posted(agent: str, then: str, stop_reason: str, reward: float) -> None:
    agent, row = agent.format(asking.__file__), {"then": then}
    (episode,), _ = play(agent, lambda prompt: "y", row=row, episode_timeout_s=3.0)
    assert (episode.stop_reason, episode.environment_reward) == (stop_reason, reward)
