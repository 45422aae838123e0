"""Agents ask a gateway that only records: what is stored of their sessions, whatever happens to it."""

import json
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from anthropic import Anthropic
from openai import InternalServerError, OpenAI, PermissionDeniedError

from agentloop.training.train import train
from context.authors import DEMONSTRATION, default_authors
from context.templates.model_files import load_model_files
from replay.records import Trajectory
from replay.storage.databases import Location
from replay.store import ReplayStore
from tests.fakes.engine_sampling import plain_log_probs
from tests.fakes.engine_server import EngineServer, serving
from tests.fakes.processes import Program, until
from tests.fakes.records import sql
from tests.fakes.runs import SilentDisplay, rows, small_config
from tests.fakes.scripted_http import scripted_server
from tests.fakes.shell import Shell

KEY, UPSTREAM_KEY = "the-agents-secret", "the-engines-secret"
BEARER = {"Authorization": f"Bearer {KEY}"}
TEMPERATURE = 0.7


@pytest.fixture
def server(qwen2: Path) -> Iterator[EngineServer]:
    with serving(qwen2, key=UPSTREAM_KEY) as server:
        yield server


class Recorder(Program):
    """`agentloop gateway --record`, once it listens."""

    def __init__(self, buffer: Location, upstream: str, model: Path, *words: str) -> None:
        given = ["--record", buffer, "--upstream", upstream, "--model", model, "--port", "0", *words]
        keys = {"AGENTLOOP_GATEWAY_KEY": KEY, "AGENTLOOP_UPSTREAM_KEY": UPSTREAM_KEY}
        super().__init__("gateway", *given, place=keys)
        self.says("each attempt at a task")
        self.url = re.findall(r"http://[\d.]+:\d+(?=/e/NAME)", self.output)[0]

    def agent(self, name: str) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/e/{name}/v1", api_key=KEY, max_retries=0)

    def end(self, name: str, **told: Any) -> httpx2.Response:
        return httpx2.post(f"{self.url}/e/{name}/reward", json={"end": True, **told}, headers=BEARER)


def said(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


def reply(client: OpenAI, messages: list[Any]) -> dict[str, str]:
    found = client.chat.completions.create(model="policy", messages=messages, max_tokens=12).choices[0].message
    return said(found.content or "", "assistant")


def talk(client: OpenAI, turns: int = 3) -> list[dict[str, str]]:
    """Replies are seldom ended by the model with random weights, so that most requests are new segments."""
    messages = [said("Say something.")]
    for turn in range(turns):
        messages += [reply(client, messages), said(f"More, {turn}.")]
    return messages[:-1]


def stored(buffer: Location) -> dict[str, Trajectory]:
    """By the number of their turns."""
    with closing(ReplayStore.open(buffer, read_only=True)) as store:
        assert store.verify().corrupt == {}
        found = store.read([id for (id,) in rows(buffer, "select id from trajectories order by slot")])
    return {row.id: row for row in found}


def no_session_is_left(buffer: Location) -> bool:
    return rows(buffer, "select (select count(*) from sessions) + (select count(*) from session_nodes)") == [(0,)]


@pytest.mark.slow
@pytest.mark.every_database
def test_sessions_are_rows_with_the_engines_log_probs(location: Location, server: EngineServer, qwen2: Path) -> None:
    with Recorder(location, server.address, qwen2, "--temperature", str(TEMPERATURE)) as recorder:
        talks = [talk(recorder.agent("first")), talk(recorder.agent("second"), 2)]
        recorder.agent("second").responses.create(model="policy", input="Hello.", max_output_tokens=9)
        anthropic = Anthropic(base_url=f"{recorder.url}/e/third", api_key=KEY)
        anthropic.messages.create(model="policy", messages=[said("Hello.")], max_tokens=9)  # type: ignore[list-item]
        peak = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{recorder.id}/status").read_text())
        assert int(peak[0]) < 220 * 1024
        for name, reward in (("first", 1.0), ("second", 0.25), ("third", 2)):
            assert recorder.end(name, reward=reward).status_code == 200
        assert recorder.end("third", reward=1.0).status_code == 403
        with pytest.raises(PermissionDeniedError, match="got one that has ended"):
            talk(recorder.agent("first"))
        recorder.end_with(signal.SIGINT, code=130)
    found = list(stored(location).values())
    seen = [(row.record.reward, row.record.success, row.record.num_turns) for row in found]
    assert seen == [*((1.0, True, 3), (0.25, False, 3), (2.0, True, 1))]
    assert [row.messages[-1].content for row in found[:1]] == [talks[0][-1]["content"]]
    assert [row.id.partition(":")[2] for row in found] == ["first", "second", "third"]
    sampled = 0
    for row in found:
        assert {row.record.source, row.record.stop_reason} == {"gateway", "answered"}
        assert (row.record.temperature, row.record.policy_version_max) == (TEMPERATURE, 0)
        for segment in row.segments:
            tokens = segment.tokens
            trained = default_authors().is_trained(tokens.authors)
            ids = tokens.token_ids.tolist()
            scored = np.array([np.nan, *plain_log_probs(server.models.model, ids[:1], ids[1:], TEMPERATURE)])
            assert np.abs(tokens.behavior_log_probs - scored)[trained].max() < 1e-4
            sampled += trained.sum()
    assert sampled == sum(row.record.num_action_tokens for row in found) > 0
    assert no_session_is_left(location)
    if isinstance(location, Path):
        written = b"".join(path.read_bytes() for path in location.parent.glob(f"{location.name}*"))
        assert not [key for key in (KEY, UPSTREAM_KEY) if key.encode() in written or key in recorder.output]


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGTERM])
def test_sessions_go_on_after_a_crash_and_replies_come_again(
    tmp_path: Path, server: EngineServer, qwen2: Path, ended_by: signal.Signals
) -> None:
    buffer = tmp_path / "history.sqlite"
    with Recorder(buffer, server.address, qwen2) as recorder:
        server.models.pace_s = 0.2
        lost = {"model": "policy", "messages": [said("Hello.")], "max_tokens": 8}
        for number, name in enumerate(("lost", "asks-else", "gives-up"), 1):
            with suppress(httpx2.ReadTimeout):  # an agent that hangs up while it is answered
                httpx2.post(f"{recorder.url}/e/{name}/v1/chat/completions", json=lost, headers=BEARER, timeout=0.1)
            until(lambda: rows(buffer, "select count(*) from session_nodes") == [(number,)])  # noqa: B023
        given = {name: talk(recorder.agent(name), 1) for name in ("goes-on", "ends")}
        until(lambda: rows(buffer, "select count(*), sum(status = 'trained') from session_nodes") == [(5, 2)])
        recorder.send(ended_by)
        recorder.wait()
    with Recorder(buffer, server.address, qwen2) as recorder:
        asked = len(server.requests)
        again = reply(recorder.agent("lost"), [said("Hello.")])
        assert len(server.requests) == asked  # it is the reply that was sampled before the crash
        another = reply(recorder.agent("lost"), [said("Hello.")])
        assert len(server.requests) == asked + 1
        reply(recorder.agent("goes-on"), [*given["goes-on"], said("More.")])
        reply(recorder.agent("asks-else"), [said("Else?")])
        ends = [recorder.end(name, reward=1.0).status_code for name in [*given, "lost", "asks-else", "gives-up"]]
    found, ok = [row.nodes for row in stored(buffer).values()], ["trained"]
    statuses = [[node.status for node in nodes] for nodes in found]
    assert (statuses, ends) == ([ok * 2, ok, ok * 2, ["undelivered", *ok]], [*[200] * 4, 400])
    assert [node.messages[-1].content for node in found[2]] == [again["content"], another["content"]]
    assert no_session_is_left(buffer)


@pytest.mark.slow
def test_a_session_that_nobody_ends_is_stored_unrewarded(tmp_path: Path, server: EngineServer, qwen2: Path) -> None:
    buffer = tmp_path / "history.sqlite"
    with Recorder(buffer, server.address, qwen2) as recorder:
        talk(recorder.agent("left-open"), 2)
        recorder.agent("asks-nothing").models.list()
        bad = recorder.end("left-open", rewards={"helper": 1.0})
        assert (bad.status_code, recorder.end("left-open", reward=1.0, end=False).status_code) == (400, 400)
    with Recorder(buffer, server.address, qwen2, "--idle-s", "0.4") as recorder:
        until(lambda: no_session_is_left(buffer))
        with pytest.raises(PermissionDeniedError, match="got one that has ended"):
            talk(recorder.agent("left-open"))
    (row,) = stored(buffer).values()
    assert (row.record.stop_reason, row.record.reward, row.record.success) == ("unrewarded", 0.0, False)
    assert len(row.nodes) == 2


CALL = {"id": "call_up", "type": "function", "function": {"name": "look", "arguments": '{"key": "a"}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.slow
def test_replies_of_a_model_that_gives_no_tokens_are_stored_to_be_imitated(
    tmp_path: Path, qwen2: Path, shell: Shell
) -> None:
    buffer = tmp_path / "history.sqlite"
    with (
        scripted_server() as upstream,
        Recorder(buffer, f"{upstream.url}/v1", qwen2, "--text", "--upstream-model", "large") as recorder,
    ):
        answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "large"}

        def answers(finish: str, **message: Any) -> None:
            choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": None, **message}}
            upstream.answers["/v1/chat/completions"] = (200, {**answer, "choices": [choice]})

        ask = recorder.agent("a").chat.completions.create
        answers("tool_calls", tool_calls=[CALL])
        messages: list[Any] = [said("What is a?")]
        called = ask(model="policy", messages=messages, tools=[TOOL]).choices[0].message  # type: ignore[list-item]
        assert called.tool_calls is not None
        messages += [
            called.model_dump(exclude_none=True),
            {**said("7", "tool"), "tool_call_id": called.tool_calls[0].id},
        ]
        answers("stop", content="It is 7.")
        last = ask(model="policy", messages=messages, tools=[TOOL], max_tokens=50)  # type: ignore[list-item]
        assert last.choices[0].message.content == "It is 7."
        sent = upstream.asked[-1][1]
        assert (sent["model"], sent["max_tokens"], sent["messages"][-1]) == ("large", 50, messages[-1])
        assert sent["messages"][1]["tool_calls"][0]["id"] == called.tool_calls[0].id
        assert sent["tools"] == [TOOL] and upstream.keys == {f"Bearer {UPSTREAM_KEY}"}
        upstream.answers["/v1/chat/completions"] = (401, {"error": {"message": f"{UPSTREAM_KEY} is unknown"}})
        refused = httpx2.post(
            f"{recorder.url}/e/b/v1/chat/completions",
            json={"model": "policy", "messages": messages[:1]},
            headers=BEARER,
        )
        assert refused.status_code == 503 and "*** is unknown" in refused.text
        assert recorder.end("a", reward=1.0).status_code == 200
        assert "text without log-probs, for imitation only" in recorder.output
    (row,) = stored(buffer).values()
    authors, renderer = default_authors(), load_model_files(qwen2).renderer(default_authors())
    (part,) = row.segments
    ours = part.tokens.authors == authors.code(DEMONSTRATION)
    *before, answer = row.messages
    written = renderer.reply(renderer.render(before, [TOOL]), answer)
    assert part.tokens.token_ids[ours].tolist()[-len(written) :] == written
    assert np.isnan(part.tokens.behavior_log_probs).all()
    assert (row.record.logprobs_mode, row.record.num_action_tokens) == ("none", ours.sum())
    assert row.record.advantage == 1.0
    asked: list[str | Path] = ["replay", "demonstrations", buffer, "wins.jsonl"]
    assert shell.type(asked, tmp_path)[1].startswith("1 rows in wins.jsonl")
    assert json.dumps([TOOL]) in (tmp_path / "wins.jsonl").read_text()  # as the template shows them, in that order


@pytest.mark.slow
def test_recorded_sessions_feed_a_later_run(tmp_path: Path, server: EngineServer, qwen2: Path) -> None:
    buffer = tmp_path / "history.sqlite"
    with Recorder(buffer, server.address, qwen2) as recorder:

        def attempt(number: int) -> None:
            talk(recorder.agent(f"attempt-{number}"), 1 + number % 3)
            recorder.end(f"attempt-{number}", reward=float(number % 2))

        for number in range(4):
            attempt(number)
        with ThreadPoolExecutor(8) as agents:
            list(agents.map(attempt, range(4, 200)))
    # Each is compared with those before it: all are attempts at one task.
    advantages = [row.record.advantage for row in stored(buffer).values()]
    assert advantages[:4] == pytest.approx([0.0, 1.0, -0.5, 2 / 3])
    replay = {"sampler": "uniform", "successful_only": False, "attach": {"earlier": str(buffer)}}
    config = small_config(tmp_path, qwen2, run={"iterations": 2}, evaluation={"every": 0, "tasks": 4}, replay=replay)
    display = SilentDisplay()
    run = train(config, display=display).folder
    assert f"attached {buffer} as earlier: 200 rows, 200 of them copied now" in display.notes
    drawn = "select max(token_gap_max), max(abs(drift_mean - 1)), sum(d.advantage != 0), count(*) from draws d"
    where = "join trajectories t on t.id = d.trajectory where t.source = 'earlier' and d.state = 'committed'"
    by = "group by d.iteration order by d.iteration"
    (gap, drift, learned, count), (_, drifted, _, more) = rows(run / "replay.sqlite", f"{drawn} {where} {by}")
    assert (count, more) == (4, 4) and learned > 2
    assert max(gap, drift) < 1e-3  # the policy is what had sampled them: its log-probs are those that were stored
    assert drifted > 10 * drift  # and then it has learned


@pytest.mark.slow
def test_refused_recording_is_one_line(
    tmp_path: Path, qwen2: Path, server: EngineServer, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["gateway", "--record", "h.sqlite", "--upstream", server.address, "--model", qwen2, "--port", "0"]
    bare = shutil.copytree(qwen2, tmp_path / "bare")
    (bare / "config.json").unlink()
    (wordless := tmp_path / "wordless").mkdir()
    shutil.copy(qwen2 / "config.json", wordless)
    (wordless / "tokenizer.json").write_text("{")
    cases: list[tuple[list[str | Path], str]] = [
        (["gateway"], "--record, --upstream and --model must be given, or --run alone, got None, None, None, None. "),
        ([*words, "--run", "r"], "--record, --upstream and --model must be given, or --run alone, got h.sqlite, "),
        ([*words, "--temperature", "0"], "--temperature must be above 0, got 0: "),
        ([*words, "--host", "0.0.0.0"], "AGENTLOOP_GATEWAY_KEY must be set where others reach --host, got none for 0"),
        (words, "AGENTLOOP_UPSTREAM_KEY must hold the engine's key, got status 401"),
        ([*words, "--public-url", "x:1"], "--public-url must begin with http:// or https://, got 'x:1'."),
        ([*words, "--text"], "--upstream-model must name the upstream's model with --text, got none."),
        ([*words[:6], bare], "--model must be a folder with the model's config.json, got "),
    ]
    for given, expected in cases:
        assert shell.refusal(given, tmp_path).startswith(expected)
    monkeypatch.setenv("AGENTLOOP_UPSTREAM_KEY", UPSTREAM_KEY)
    refused = shell.refusal([*words[:6], wordless], tmp_path)
    assert refused.startswith("--model must hold a tokenizer that transformers loads, got ")
    refused = shell.refusal([*words, "--upstream-model", "other"], tmp_path)
    assert refused.startswith("--upstream must name servers of other, got tiny from ")
    assert refused.rstrip().endswith("A server other than vLLM can be recorded with --text, for imitation.")


@pytest.mark.slow
def test_recording_goes_on_with_what_it_was_made_with_alone(tmp_path: Path, qwen2: Path, shell: Shell) -> None:
    tuned = shutil.copytree(qwen2, tmp_path / "tuned")
    with scripted_server() as upstream, serving(qwen2) as server:
        text, large = ["--upstream", upstream.url, "--text", "--upstream-model"], "large"
        with Recorder(tmp_path / "h.sqlite", upstream.url, qwen2, *text, large):
            pass
        taken = upstream.url.rpartition(":")[2]
        for words in (
            [*text, "larger", "--model", qwen2],
            [*text, large, "--model", tuned],
            ["--upstream", server.address, "--model", qwen2],
        ):
            refused = shell.refusal(["gateway", "--record", "h.sqlite", "--port", taken, *words], tmp_path)
            assert refused.startswith("--name must be of a recording of this model, got gateway, which is not of ")


@pytest.mark.slow
def test_a_recording_that_a_gateway_goes_on_with_is_refused_to_another(
    tmp_path: Path, server: EngineServer, qwen2: Path
) -> None:
    buffer = tmp_path / "history.sqlite"
    with Recorder(buffer, server.address, qwen2) as first:
        with pytest.raises(AssertionError, match="--name must be of a recording that no other gateway goes on with, "):
            Recorder(buffer, server.address, qwen2)
        talk(first.agent("a"))
        assert first.end("a", reward=1.0).status_code == 200
        sql(buffer, "update runs set epoch = epoch + 1")  # as one does that found the lease over
        with pytest.raises(InternalServerError, match="503 .*Another gateway goes on with this recording: ask that"):
            talk(first.agent("b"))
        assert "Traceback" not in first.output
    assert len(stored(buffer)) == 1
