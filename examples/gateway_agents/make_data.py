"""Writes tasks of the quickstart's look-ups, and demonstrations: what an agent asks, answered by a careless colleague.

The agent runs as it does in training, and asks at a gateway of the same code. What it asked there, with the replies,
are the conversations that a model begins with: in the agent's own words, whatever client it uses.
"""

import argparse
import asyncio
import inspect
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentloop import Message, Task, ToolCall
from agentloop.environments.lookup_chain import LookupChain
from agentloop.gateway.agent_request import AgentReply, AgentRequest
from agentloop.gateway.endpoints import create_app
from agentloop.gateway.run_gateway import serving
from agentloop.user_code import load_function
from context.messages import to_template
from examples.chat_rows import write_lines

AGENT = "examples/gateway_agents/openai_loop.py:solve"
SHOWN = LookupChain(p_next=0.7, p_stop=0.7)
"""Whose demonstrator is careless: of a trail of four keys it comes to the end one time in four."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/gateway_agents"))
    parser.add_argument("--agent", default=AGENT, help="path/to/file.py:function")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=int, default=1000, help="episodes, each of a task of its own")
    parser.add_argument("--tasks", type=int, default=2000, help="to train on, and to be judged by")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(given.seed)
    lines = demonstrations(given.agent, given.demonstrations, rng)
    write_lines(given.folder / "demonstrations.jsonl", lines)
    write_lines(given.folder / "tasks.jsonl", (row(SHOWN.make_task(rng)) for _ in range(given.tasks)))


def row(task: Task) -> dict[str, Any]:
    """What an agent is given."""
    system, asked = task.messages()
    code = task.payload["code"]
    return {"system": system.content, "prompt": asked.content, **task.payload, "answer": f'The code is "{code}".'}


def demonstrations(agent: str, count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """The conversations of so many episodes of an agent, as `agentloop sft` reads them."""
    solve = load_function(agent, what="--agent")
    colleagues: dict[str, Colleague] = {}
    with serving(create_app(Episodes(colleagues)), host="127.0.0.1", port=0) as url:
        for number in range(count):
            task = SHOWN.make_task(rng)
            colleague = colleagues[str(number)] = Colleague(task, rng)
            ended = solve(row(task), f"{url}/e/{number}/v1", "any key")
            if inspect.iscoroutine(ended):
                asyncio.run(ended)
            yield from colleague.conversations()


@dataclass
class Colleague:
    """Answers the requests of one episode."""

    task: Task
    rng: random.Random
    asked: list[tuple[AgentRequest, Message]] = field(default_factory=list)
    """With the replies."""

    async def reply(self, request: AgentRequest, gone: object) -> AgentReply:
        said, id = careless_reply(request, self.task, self.rng), f"demonstrated{len(self.asked)}"
        calls = tuple(replace(call, id=f"call_{len(self.asked)}") for call in said.tool_calls)
        said = replace(said, tool_calls=calls)
        self.asked.append((request, said))
        return AgentReply(id, said, "tool_calls" if calls else "stop", 0, 0, 0)

    def find_reply(self, id: str) -> None:
        """Find nothing: these agents name no reply by its id."""

    def mark_delivered(self, reply: AgentReply) -> None:
        """Nothing is to be done."""

    async def count_tokens(self, request: AgentRequest) -> int:
        return 0

    async def reward(self, rewards: Mapping[str, float], *, end: bool) -> None:
        """Nothing is learned from it."""

    def conversations(self) -> Iterator[dict[str, Any]]:
        """Those that no later one goes on from, so that each reply is there once."""
        for number, (request, said) in enumerate(self.asked):
            before, count = request.messages, len(request.messages)
            later = [other.messages for other, _ in self.asked[number + 1 :]]
            if not any(m[:count] == before and [x.role for x in m[count : count + 1]] == ["assistant"] for m in later):
                yield {"messages": [to_template(message) for message in (*before, said)], "tools": request.tools}


@dataclass
class Episodes:
    """Those that run, by their ids."""

    colleagues: Mapping[str, Colleague]

    async def check(self, episode: str, key: str) -> None:
        """Whoever asks on this machine may."""

    async def authorize(self, episode: str, key: str) -> Colleague:
        return self.colleagues[episode]


def careless_reply(request: AgentRequest, task: Task, rng: random.Random) -> Message:
    """The demonstrator's of the look-ups; a scout reports what that one would look up next, and a lead believes it."""
    last = request.messages[-1]
    if request.agent != "lead":
        key = _quoted(next(message.content for message in request.messages if message.role == "user"))
        said = SHOWN.demonstrate(replace(task, payload={**task.payload, "key": key}), request.messages, rng)
        if request.agent == "scout" and last.role == "tool" and said.tool_calls:
            return Message("assistant", f'Next is "{said.tool_calls[0].arguments["key"]}".')
        return said
    report = next(message for message in reversed(request.messages) if '"' in message.content)
    if report.content.startswith("The code is"):
        return Message("assistant", report.content)
    key = _quoted(report.content)
    if last.role == "user" and last is not report:  # "Sum up."
        return Message("assistant", f'Go on from "{key}".')
    return Message("assistant", "", tool_calls=(ToolCall("send", {"key": key}),))


def _quoted(text: str) -> str:
    return re.findall('"([^"]*)"', text)[-1]


if __name__ == "__main__":
    main()
