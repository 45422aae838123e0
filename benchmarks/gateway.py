"""Milliseconds that the gateway adds to a call of an engine, with each reply in SQL before the agent has it.

32 agents at once, of 20 turns each; a process answers as vLLM does, 500 ms after it was asked, and a gateway that
records stands before it. Rounds through that, rounds through what its libraries do alone, and rounds that ask the
engine itself, by as many tokens, alternate; each call is compared with the one in its place. They begin within the
time of one turn and a tool takes up to 200 ms, at random: agents are programs, which neither begin nor go in step.
"""

import asyncio
import gc
import json
import multiprocessing
import os
import random
import re
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil  # type: ignore[import-untyped]
import sqlalchemy as sa
from jinja2.sandbox import ImmutableSandboxedEnvironment
from openai.types.chat import ChatCompletion
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tokenizers import Tokenizer

from agentloop.engines.remote.vllm_protocol import GENERATE, generate_body
from benchmarks._rows import seconds
from benchmarks.context import SEARCH, make_conversation
from replay.pages.serve import bound_socket, quiet_server
from tests.fakes.processes import Program

_TABLES = sa.MetaData()
_EPOCHS = sa.Table("epochs", _TABLES, sa.Column("epoch", sa.Integer))
_NODES = sa.Table(
    "nodes",
    _TABLES,
    sa.Column("session", sa.String, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("status", sa.String),
    sa.Column("text", sa.String),
    sa.Column("ids", sa.LargeBinary),
    sa.Column("log_probs", sa.LargeBinary),
)
GOALS = {"added_ms_p50": "<= 5", "added_ms_p99": "<= 25"}
SESSIONS, TURNS, ENGINE_S, TOOL_S, REPLY, RESULT = 32, 20, 0.5, 0.2, 60, 200
_CALL = {"name": "search", "arguments": json.dumps({"query": "where it stands " * 15})}
SAID = {"role": "assistant", "content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": _CALL}]}
_CHOICE = {"index": 0, "message": SAID, "finish_reason": "tool_calls", "logprobs": None}
_ANSWER = {"id": "c", "object": "chat.completion", "created": 0, "model": "policy", "choices": [_CHOICE]}


def serve_engine(listening: socket.socket, replies: Sequence[Sequence[int]]) -> None:
    """A vLLM that says one of `replies` after another."""
    numbers = count()

    async def generate(request: Request) -> JSONResponse:
        arrived, asked = time.monotonic(), json.loads(await request.body())
        ids = list(replies[next(numbers) % len(replies)])[: asked["sampling_params"]["max_tokens"]]
        scored = [{"token_id": id, "logprob": -0.5, "top_logprobs": []} for id in ids]
        said = {"token_ids": ids, "finish_reason": "stop", "logprobs": {"content": scored}}
        answer = {"model": "m", "choices": [said], "usage": {"prompt_tokens": len(asked["token_ids"])}}
        await asyncio.sleep(arrived + ENGINE_S - time.monotonic())
        return JSONResponse(answer)

    facts = {"/version": {"version": "0.32.0"}, "/v1/models": {"data": [{"id": "m", "max_model_len": 1 << 20}]}}
    routes = [Route(path, lambda asked: JSONResponse(facts[asked.url.path])) for path in facts]
    routes.append(Route(GENERATE, generate, methods=["POST"]))
    gc.freeze()  # or it looks for garbage for 200 ms, now and then
    quiet_server(Starlette(routes=routes)).run(sockets=[listening])


def serve_libraries(listening: socket.socket, given: tuple[str, Path]) -> None:
    """What nobody can leave out, by the same libraries: the conversation is rendered by its template once, what is new
    tokenized, the engine asked by ids, the reply decoded, committed behind a look at who may write, answered as
    OpenAI's type, and marked as given.

    Nothing is checked, compared or parsed: the ids of prompts and the answer are made up.
    """
    engine, folder = given
    client = httpx2.AsyncClient(base_url=engine, timeout=60)
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = sandbox.from_string((folder / "chat_template.jinja").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    known = defaultdict[str, str](str)
    database = sa.create_engine(f"sqlite:///{folder / 'libraries.sqlite'}")
    sa.event.listen(database, "connect", lambda made, _: made.execute("pragma synchronous = full"))
    with database.begin() as connection:
        connection.exec_driver_sql("pragma journal_mode = wal")
        _TABLES.create_all(connection)
        connection.execute(_EPOCHS.insert().values(epoch=1))
    writer = ThreadPoolExecutor(1)

    def write(statement: sa.Executable) -> None:
        with database.begin() as connection:
            assert connection.scalar(sa.select(_EPOCHS.c.epoch)) == 1
            connection.execute(statement)

    async def recorded(request: Request) -> Response:
        asked = json.loads(await request.body())
        session, messages = request.path_params["session"], asked["messages"]
        place = {"session": session, "number": len(messages)}
        rendered = template.render(messages=messages, tools=asked["tools"], add_generation_prompt=True)
        ids = tokenizer.encode(rendered.removeprefix(known[session])).ids
        known[session] = rendered
        said = (await client.post(GENERATE, json=_by_ids(messages))).json()["choices"][0]
        ids += said["token_ids"]
        log_probs = np.array([token["logprob"] for token in said["logprobs"]["content"]], np.float32)
        row = {
            "text": tokenizer.decode(said["token_ids"]),
            "ids": np.array(ids, np.int32).tobytes(),
            "log_probs": log_probs.tobytes(),
        }
        keep = partial(write, _NODES.insert().values(**place, **row, status="undelivered"))
        await asyncio.get_running_loop().run_in_executor(writer, keep)
        answer = ChatCompletion.model_validate(_ANSWER).model_dump_json(exclude_unset=True)
        here = (_NODES.c.session == place["session"]) & (_NODES.c.number == place["number"])
        writer.submit(write, _NODES.update().where(here).values(status="trained"))
        return Response(answer, media_type="application/json")

    gc.freeze()
    quiet_server(Starlette(routes=[Route("/{session}", recorded, methods=["POST"])])).run(sockets=[listening])


def made_ids(messages: Sequence[object]) -> list[int]:
    """As many as the gateway's prompt has."""
    return [7] * (100 + len(messages) // 2 * (REPLY + RESULT))


async def play(call: Callable[..., Awaitable[Any]], results: Sequence[str], *, seed: int) -> list[float]:
    """Milliseconds of each call of all sessions; `call` is given a conversation and its session's number."""

    async def session(number: int) -> list[float]:
        chance, taken = random.Random(f"{seed}-{number}"), []
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"Search for {number}."}]
        await asyncio.sleep(chance.uniform(0, ENGINE_S))
        for found in results[number::SESSIONS]:
            await asyncio.sleep(chance.uniform(0, TOOL_S))
            began = time.perf_counter()
            said = await call(messages, number)
            taken.append(1000 * (time.perf_counter() - began))
            messages += [said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": found}]
        return taken

    return [each for found in await asyncio.gather(*map(session, range(SESSIONS))) for each in found]


def measure(folder: Path, *, rounds: int = 3, turns: int = TURNS) -> dict[str, float]:
    made = make_conversation(turns * SESSIONS, reply=REPLY, result=RESULT)
    made.tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(made.tokenizer)}))
    stop = made.tokenizer.eos_token_id
    replies = [[*turn.reply_ids[: turn.reply_ids.index(stop)], stop] for turn in made.turns]
    results = [turn.result.content for turn in made.turns]
    words = ("--model", folder, "--port", "0", "--record", folder / "h.sqlite")
    with (
        served(serve_engine, replies) as engine,
        served(serve_libraries, (engine, folder)) as libraries,
        Program("gateway", "--upstream", engine, *words) as gateway,
    ):
        gateway.says("each attempt at a task")
        url = re.findall(r"http://[\d.]+:\d+(?=/e/NAME)", gateway.output)[0]
        found = asyncio.run(_rounds(url, engine, libraries, gateway.id, results, rounds))
    return {**found, "fsync_ms": fsync_ms(folder)}


@contextmanager
def served(serve: Callable[[socket.socket, Any], None], given: object) -> Iterator[str]:
    """The address of a process that serves."""
    listening = bound_socket("127.0.0.1", 0)
    serving = multiprocessing.get_context("spawn").Process(target=serve, args=(listening, given))
    serving.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        serving.terminate()
        serving.join()


async def _rounds(
    url: str, engine: str, libraries: str, gateway: int, results: Sequence[str], rounds: int
) -> dict[str, float]:
    added: list[float] = []
    bound: list[float] = []
    cpu, number = 0.0, 0
    process = psutil.Process(gateway)
    gc.freeze()
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=SESSIONS)
    async with httpx2.AsyncClient(timeout=60, limits=limits, headers={"Authorization": "Bearer x"}) as client:

        async def post(url: str, body: Mapping[str, object]) -> Any:
            return (await client.post(url, json=body)).raise_for_status().json()["choices"][0]

        async def directly(messages: list[dict[str, Any]], session: int) -> Any:
            await post(engine + GENERATE, _by_ids(messages))
            return SAID

        async def through(messages: list[dict[str, Any]], session: int, *, path: str) -> Any:
            body = {"model": "policy", "messages": messages, "tools": [SEARCH]}
            return (await post(path.format(f"{number}-{session}"), body))["message"]

        for number in range(rounds + 1):
            before = await play(directly, results, seed=number)
            between = await play(partial(through, path=libraries + "/{}"), results, seed=number)
            used = sum(process.cpu_times()[:2])
            behind = await play(partial(through, path=url + "/e/{}/v1/chat/completions"), results, seed=number)
            if number:  # the first warms up
                added += [b - a for a, b in zip(before, behind, strict=True)]
                bound += [b - a for a, b in zip(before, between, strict=True)]
                cpu += 1000 * (sum(process.cpu_times()[:2]) - used)
    by, alone = (statistics.quantiles(each, n=100) for each in (added, bound))
    shown = {
        "added_ms_p50": by[49],
        "added_ms_p99": by[98],
        "libraries_ms_p50": alone[49],
        "libraries_ms_p99": alone[98],
    }
    return {**shown, "cpu_ms": cpu / len(added)}


def _by_ids(messages: Sequence[object]) -> dict[str, Any]:
    return generate_body("m", made_ids(messages), temperature=1.0, max_new_tokens=1000)


def fsync_ms(folder: Path) -> float:
    """What each reply waits for: the median of 50 blocks of 4 KiB."""
    with (folder / "fsync").open("wb", buffering=0) as file:

        def write() -> None:
            file.write(bytes(4096))
            os.fsync(file.fileno())

        return 1000 * statistics.median(seconds(write) for _ in range(50))


def main() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder))
