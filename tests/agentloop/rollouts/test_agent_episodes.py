"""Agents that are programs or functions: how their episodes end, whatever the agent does."""

import json
import math
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from agentloop.rollouts.episodes.episode import Episode
from tests.fakes.agents import looking_up
from tests.fakes.agents.played import play
from tests.fakes.processes import processes, until
from tests.fakes.real_templates import real_template
from tests.fakes.scripted import CHATML, LOG_PROB, call

pytestmark = pytest.mark.slow  # each agent is a process that imports a client

PROGRAM = f"{sys.executable} {looking_up.__file__}"
FUNCTION = f"{looking_up.__file__}:solve"


def looks_up(prompt: str) -> str:
    return "It is 78." if "tool_response" in prompt else call("lookup")


@pytest.mark.parametrize("agent", [PROGRAM, FUNCTION], ids=["program", "function"])
def test_an_unmodified_client_plays_an_episode_of_exact_tokens(agent: str) -> None:
    (episode,), _ = play(agent, looks_up)
    found = (episode.stop_reason, episode.environment_reward, episode.num_turns, episode.num_tool_calls)
    assert found == ("answered", 1.0, 2, 1)
    (segment,) = episode.segments
    sampled = segment.tokens.policy_versions == 3
    said = CHATML.codec.decode(segment.tokens.token_ids[sampled].tolist())
    assert said == f"{call('lookup')}<|im_end|>It is 78.<|im_end|>"
    assert (segment.tokens.behavior_log_probs[sampled] == LOG_PROB).all()
    assert [message.role for message in episode.messages][:4] == ["user", "assistant", "tool", "assistant"]


def test_agents_that_ask_at_the_same_time_are_answered_together() -> None:
    episodes, policy = play(FUNCTION, looks_up, tasks=4)
    assert [episode.environment_reward for episode in episodes] == [1.0] * 4
    assert sum(policy.together) == 8 > len(policy.together)


def test_tools_that_the_template_hides_are_refused_to_the_agent_and_nothing_is_sampled() -> None:
    (episode,), policy = play(FUNCTION, looks_up, template=real_template("written/smollm2").text)
    assert "chat template must show every tool, got one that leaves lookup out of a prompt" in str(episode.problem)
    assert policy.together == []


def script(tmp_path: Path, text: str) -> str:
    """Write a program that sends one request and then runs the text."""
    path = tmp_path / "agent.py"
    asking = "import json, os, subprocess, sys, time\nfrom openai import OpenAI\nclient = OpenAI(max_retries=0)\n"
    asked = "client.chat.completions.create(model='policy', messages=[{'role': 'user', 'content': 'x'}])\n"
    path.write_text(asking + asked + text)
    return f"{sys.executable} {path}"


@pytest.mark.parametrize(
    ("rewards", "stop_reason", "reward", "kept"),
    [
        ({"rewards": {"scout": 0.25, "cook": 0.75}}, "answered", 0.5, {"scout": 0.25, "cook": 0.75}),
        ({"rewards": {"": 1, "scout": 0.25}}, "answered", 1.0, {"scout": 0.25}),
        ({"rewards": {"nobody": 0.25}}, "agent_failed", 0.0, {}),
    ],
    ids=["the mean", "under no name", "of nobody"],
)
def test_agents_of_an_episode_may_have_rewards_of_their_own(
    rewards: dict[str, Any], stop_reason: str, reward: float, kept: dict[str, float], tmp_path: Path
) -> None:
    asks = "ask = client.chat.completions.create\n" + "".join(
        f"ask(model='policy/{name}', messages=[{{'role': 'user', 'content': '{name}'}}])\n"
        for name in ("scout", "cook")
    )
    (episode,), _ = play(script(tmp_path, f"{asks}print(json.dumps({rewards!r}))"), lambda prompt: "y")
    assert (episode.stop_reason, episode.environment_reward, episode.agent_rewards) == (stop_reason, reward, kept)


def test_a_posted_end_ends_an_agent_that_goes_on(tmp_path: Path) -> None:
    post = (
        "from urllib.request import Request, urlopen\n"
        "body = json.dumps({'reward': 0.75, 'end': True}).encode()\n"
        "headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'Content-Type': 'application/json'}\n"
        "urlopen(Request(os.environ['AGENTLOOP_URL'] + '/reward', body, headers))\n"
        "time.sleep(600)\n"
    )
    (episode,), _ = play(script(tmp_path, post), lambda prompt: "y")
    assert (episode.stop_reason, episode.environment_reward) == ("answered", 0.75)


@pytest.mark.parametrize(
    "agent, problem", [(f"{sys.executable} -c 'print(5 / 0)'", "ZeroDivisionError"), ("no-such-program", "exit code")]
)
def test_an_agent_that_asks_nothing_says_nothing_of_the_policy(agent: str, problem: str) -> None:
    (episode,), _ = play(agent, looks_up)
    assert episode.failed and math.isnan(episode.environment_reward)
    assert episode.problem is not None and problem in episode.problem


def test_output_and_problem_of_an_agent_end_its_episode(tmp_path: Path) -> None:
    (episode,), _ = play(script(tmp_path, "print('{\"reward\": 1}'); sys.exit(3)"), lambda prompt: "y")
    last = episode.messages[-1]
    assert (last.role, last.name, last.content) == ("tool", "agent", 'exit code 3\n{"reward": 1}\n')
    assert (episode.stop_reason, episode.num_turns) == ("agent_failed", 1)
    assert (episode.problem, episode.environment_reward) == ('exit code 3: {"reward": 1}', 0.0)


@pytest.mark.parametrize(
    ("text", "is_program"),
    [
        ("print(dict(os.environ))", True),
        ("sys.exit(os.environ['OPENAI_API_KEY'])", True),
        ("print(os.environ['OPENAI_API_KEY'] + 'y' * 3936)", True),  # the stored output lacks the key's first digit
        ("print(json.dumps({'rewards': {os.environ['OPENAI_API_KEY']: 1.0}}))", True),
        ("def solve(row, url, key): raise ValueError('y' * 250 + key)", False),
        ("def solve(row, url, key): return {key: 'y'}", False),
    ],
)
def test_a_key_in_what_an_agent_says_is_not_stored(text: str, is_program: bool, tmp_path: Path) -> None:
    (tmp_path / "function.py").write_text(text)
    agent = script(tmp_path, text) if is_program else f"{tmp_path}/function.py:solve"
    (episode,), _ = play(agent, lambda prompt: "y")
    assert "***" in episode.messages[-1].content
    assert not re.search("[0-9a-f]{33}", f"{episode.messages} {episode.problem}")


CONTAINED = """\
import json, os, socket, subprocess, sys, time, urllib.request
def tried(act):
    try:
        return act()
    except OSError as problem:
        return type(problem).__name__
row = json.loads(sys.stdin.readline())
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": row["prompt"]}]}).encode()
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
said = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]
exec(row["then"])
"""
LOOKS_AROUND = """\
print(json.dumps([
    json.load(open(os.environ["AGENTLOOP_TASK"])) == row,
    tried(lambda: open(row["shown"]).read()),
    tried(lambda: open(row["shown"], "w")),
    tried(lambda: open(row["project"]).read()),
    tried(lambda: open("notes", "w").write("own")),
    tried(lambda: socket.create_connection(("127.0.0.1", row["port"]))),
    os.environ.get("SECRET"),
]))
print(json.dumps({"reward": float(said == "It is 78.")}))
"""


def contained(
    then: str,
    folder: Path,
    *,
    episode_timeout_s: float = 60.0,
    gateway: Mapping[str, Any] = {},
    says: Callable[[str], str] = lambda prompt: "It is 78.",
    read: Sequence[str] = (),
    **row: Any,
) -> Episode:
    """Play an episode of a program that sends one request in a sandbox and then runs `then`."""
    (folder / "agent.py").write_text(CONTAINED)
    (folder / "shown").write_text("seen")
    row = {"then": then, "shown": str(folder / "shown"), "project": __file__, **row}
    options = {"sandbox": "bubblewrap", "limits": {"memory_mb": 200}, "read": [row["shown"], *read]}
    agent, limit = f"/usr/bin/python3 {folder / 'agent.py'}", episode_timeout_s
    (episode,), _ = play(agent, says, options=options, row=row, gateway=gateway, episode_timeout_s=limit)
    return episode


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the sandbox's user may read."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_contained_agent_reaches_the_gateway_and_nothing_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    with socket.create_server(("127.0.0.1", 0)) as other:
        episode = contained(LOOKS_AROUND, folder, port=other.getsockname()[1])
    assert (episode.stop_reason, episode.environment_reward, episode.num_turns) == ("answered", 1.0, 1)
    refused = ["OSError", "FileNotFoundError", 3, "ConnectionRefusedError", None]
    assert json.loads(episode.messages[-1].content.splitlines()[0]) == [True, "seen", *refused]


def test_a_contained_agent_asks_on_this_machine_whatever_others_take_for_the_address(folder: Path) -> None:
    rewarded = "print(json.dumps({'reward': 1}))"
    episode = contained(rewarded, folder, gateway={"public_url": "https://trainer.invalid/agents"})
    assert (episode.stop_reason, episode.num_turns) == ("answered", 1)


def test_the_key_of_an_episode_is_on_no_command_line_of_its_sandbox(folder: Path) -> None:
    lines: list[bytes] = []

    def looks(prompt: str) -> str:
        processes(lambda one: lines.append((one / "cmdline").read_bytes()) is None)
        return "It is 78."

    contained("", folder, says=looks)
    started = [line for line in lines if str(folder / "agent.py").encode() in line]
    assert started and not [line for line in started if re.search(b"[0-9a-f]{64}", line)]


@pytest.mark.parametrize("asked", [True, False], ids=["killed", "not started"])
def test_a_sandbox_that_is_lost_says_nothing_of_the_policy(asked: bool, folder: Path) -> None:
    def kills(prompt: str) -> str:
        def is_ours(one: Path) -> bool:
            first, *words = (one / "cmdline").read_bytes().split(b"\0")
            return first.endswith(b"bwrap") and str(folder / "agent.py").encode() in words

        os.kill(min(processes(is_ours)), signal.SIGKILL)
        return "It is 78."

    read = [] if asked else [str(folder / "gone")]
    episode = contained("", folder, says=kills, read=read)
    assert (episode.stop_reason, episode.num_turns) == ("not_judged", int(asked))
    assert math.isnan(episode.environment_reward)
    assert str(episode.problem).startswith("the sandbox did not start, or was lost: exit code ")


@pytest.mark.parametrize(
    ("then", "stop_reason"),
    [
        ("b'0' * 300_000_000", "agent_failed"),
        ("[subprocess.Popen(['sleep', '60.44']) for _ in range(20)]", "agent_failed"),
        ("subprocess.Popen(['sleep', '60.44'], start_new_session=True); time.sleep(600)", "overtime"),
    ],
    ids=["memory", "processes", "time"],
)
def test_limits_hold_for_a_contained_agent_and_nothing_of_it_is_left(then: str, stop_reason: str, folder: Path) -> None:
    assert contained(then, folder, episode_timeout_s=8.0).stop_reason == stop_reason
    until(lambda: not processes(lambda one: b"60.44" in (one / "cmdline").read_bytes()))
