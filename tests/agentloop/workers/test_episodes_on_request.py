"""Agents that others start play a run's tickets at a gateway, whatever happens to them and to it."""

import asyncio
import re
import signal
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI, PermissionDeniedError
from starlette.requests import Request

from agentloop.config.sections.rollout import GatewaySection
from agentloop.gateway.run_gateway import run_gateway
from agentloop.records import Completion
from agentloop.rollouts.actors import agents_policy
from agentloop.workers.episodes_on_request import EpisodeDesk
from agentloop.workers.joined_run import join_run
from replay.storage.collecting.ticket_records import EVALUATION
from replay.storage.databases import Location
from tests.fakes.engine_server import EngineServer
from tests.fakes.processes import Program, until
from tests.fakes.runs import rows
from tests.fakes.worker_runs import IssuedRun, issued_run, worker_config

pytestmark = pytest.mark.slow

KEY = "the-agents-secret"


@pytest.fixture
def run(tmp_path: Path, qwen2: Path, server: EngineServer, location: Location) -> Iterator[IssuedRun]:
    with issued_run(worker_config(tmp_path / "runs", qwen2, server, location)) as run:
        yield run


class Desk(Program):
    """`agentloop gateway --run`, once it listens."""

    def __init__(self, run: IssuedRun, *words: str) -> None:
        place = {"AGENTLOOP_GATEWAY_KEY": KEY}
        super().__init__("gateway", "--run", run.folder, "--port", "0", *words, place=place)
        self.says("/episodes")
        self.url = re.findall(r"POST (http\S+)/episodes", self.output)[0]

    def ask(self, key: str = KEY) -> httpx2.Response:
        return httpx2.post(f"{self.url}/episodes", headers={"Authorization": f"Bearer {key}"}, timeout=60)


def reply(episode: dict[str, Any], text: str = "Say something.") -> str:
    client = OpenAI(base_url=f"{episode['url']}/v1", api_key=episode["key"], max_retries=0)
    asked: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="policy", messages=asked, max_tokens=8).choices[0].message.content or ""


def end(episode: dict[str, Any], **told: Any) -> int:
    headers = {"Authorization": f"Bearer {episode['key']}"}
    return httpx2.post(f"{episode['url']}/reward", json={"end": True, **told}, headers=headers).status_code


@pytest.mark.every_database
def test_agents_play_the_tickets_of_a_run_until_it_has_ended(run: IssuedRun) -> None:
    total = run.issue(1)
    run.issue_evaluation(2)
    with Desk(run) as desk:
        assert desk.ask("another-key").status_code == 403
        payloads = []
        for number in range(total + 2):
            episode = desk.ask().json()
            payloads.append(episode["task"])
            reply(episode)
            assert end(episode, reward=float(number % 2)) == 200
        run.until_ended(desk)
        until(lambda: run.store.tickets.episodes(run.id, 0, EVALUATION) == 2)
        run.store.roles.end_run(run.id)
        desk.says("the run has ended")
        assert desk.ask().status_code == 410
        desk.end_with(signal.SIGTERM, code=143)
    assert (run.counts.done, run.counts.rows) == (total, total)
    assert all("number" in payload for payload in payloads)
    groups = run.store.tickets.ended_groups(run.id)
    ids = [str(member.trajectory) for group in groups for member in group.members]
    found = run.store.read(ids)
    assert {row.record.source for row in found} == {"gateway"} and all(row.nodes for row in found)
    assert {row.record.reward for row in found} == {0.0, 1.0}
    (judged,) = run.store.tickets.ended_groups(run.id, EVALUATION)[:1]
    assert judged.members[0].outcome is not None
    assert KEY not in desk.output


def play_all(run: IssuedRun, desk: Desk) -> None:
    while not run.has_ended:
        found = desk.ask()
        if found.status_code == 200:
            with suppress(PermissionDeniedError):  # this test was slower than its time to be idle
                reply(found.json())
                end(found.json(), reward=1.0)


def test_tickets_of_agents_that_left_and_of_a_gateway_that_was_killed_are_played_by_others(run: IssuedRun) -> None:
    total = run.issue(1)
    with Desk(run) as first:
        lost = [first.ask().json() for _ in range(3)]
        reply(lost[0])
        assert end({**lost[1], "key": lost[0]["key"]}, reward=1.0) == 403
        first.kill()
    assert run.counts.rows == 0
    with Desk(run, "--idle-s", "1.5") as desk:
        left = desk.ask().json()
        with suppress(PermissionDeniedError):  # it has been idle for so long already
            reply(left)
        play_all(run, desk)
        assert end(left, reward=1.0) == 403  # it was idle: another has played its ticket
    assert (run.counts.done, run.counts.rows) == (total, total)


def test_an_episode_that_never_ends_is_over_in_time_with_the_reward_that_its_agent_posted(
    tmp_path: Path, qwen2: Path, server: EngineServer
) -> None:
    buffer = tmp_path / "replay.sqlite"
    config = worker_config(tmp_path / "runs", qwen2, server, buffer, rollout={"episode_timeout_s": 10.0})
    with issued_run(config) as run:
        run.issue(1)
        with Desk(run) as desk:
            episode = desk.ask().json()
            reply(episode)
            until(lambda: end(episode, reward=1.0, end=False) == 403)
            run.until(lambda counts: counts.done == 1, desk)
    assert rows(buffer, "select stop_reason, reward from trajectories") == [("answered", 1.0)]


def test_a_ticket_that_comes_when_who_asked_for_it_has_left_is_given_back(run: IssuedRun) -> None:
    left = asyncio.Event()
    messages = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def said() -> dict[str, Any]:
        if message := next(messages, None):
            return message
        await left.wait()
        return {"type": "http.disconnect"}

    async def ask(*_: object) -> Completion:
        raise AssertionError("nobody is there to ask")

    async def play() -> None:
        desk = EpisodeDesk(joined, None, idle_s=600)
        (claim,) = run.store.tickets.claim(run.id, "here", count=1, lease_s=600)
        (task,) = joined.tasks.tasks_for([claim.ticket])
        with run_gateway(GatewaySection(), agents_policy(joined.config, joined.actors.renderer)) as desk.gateway:
            async with asyncio.timeout(30):
                asks = asyncio.ensure_future(desk.ask(Request({"type": "http", "method": "POST", "headers": []}, said)))
                while not desk.waiting:
                    await asyncio.sleep(0)
                plays = asyncio.ensure_future(desk.play(claim, task, ask))
                while desk.waiting:
                    await asyncio.sleep(0)
                left.set()
                await asyncio.wait([asks, plays])
        assert plays.cancelled()

    run.issue(1)
    joined = join_run(run.folder, wait_s=30, note=print)
    with closing(joined.store):
        asyncio.run(play())
    assert run.counts.leased == 0
