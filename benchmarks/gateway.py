"""Milliseconds that the gateway adds to a call of an engine, with each reply in SQL before the agent has it.

32 agents at once, of 20 turns each; a process answers as vLLM does, 500 ms after it was asked, and a gateway that
records stands before it. Rounds through that, rounds through the least that records, and rounds that ask the engine
itself, by as many tokens, alternate; each call is compared with the one in its place. A tool takes up to 200 ms, at
random: agents do not go in step.
"""

import asyncio
import gc
import json
import multiprocessing
import os
import random
import re
import socket
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx2
import psutil  # type: ignore[import-untyped]
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from agentloop.engines.remote.vllm_protocol import GENERATE, generate_body
from benchmarks._rows import seconds
from benchmarks.context import SEARCH, make_conversation
from replay.pages.serve import bound_socket, quiet_server
from tests.fakes.processes import Program

GOALS = {"added_ms_p50": "<= 5", "added_ms_p99": "<= 25"}
SESSIONS, TURNS, ENGINE_S, TOOL_S, REPLY, RESULT = 32, 20, 0.5, 0.2, 60, 200
_CALL = {"name": "search", "arguments": json.dumps({"query": "where it stands " * 15})}
SAID = {"role": "assistant", "content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": _CALL}]}


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


def serve_least(listening: socket.socket, given: tuple[str, Path]) -> None:
    """The least that stands between and records: it reads what the agent says, asks by ids, and commits the reply's.

    With the same libraries, but nothing is rendered, tokenized, parsed or told apart: the ids are made up.
    """
    engine, file = given
    client = httpx2.AsyncClient(base_url=engine, timeout=60)
    database = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
    for statement in ("pragma journal_mode = wal", "pragma synchronous = full", "create table replies (ids text)"):
        database.execute(statement)
    writer = ThreadPoolExecutor(1)

    async def recorded(request: Request) -> JSONResponse:
        messages = json.loads(await request.body())["messages"]
        body = generate_body("m", made_ids(messages), temperature=1.0, max_new_tokens=1000)
        said = (await client.post(GENERATE, json=body)).json()["choices"][0]["token_ids"]
        keep = partial(database.execute, "insert into replies values (?)", [json.dumps(said)])
        await asyncio.get_running_loop().run_in_executor(writer, keep)
        return JSONResponse({"choices": [{"message": SAID}]})

    gc.freeze()
    quiet_server(Starlette(routes=[Route("/", recorded, methods=["POST"])])).run(sockets=[listening])


def made_ids(messages: Sequence[object]) -> list[int]:
    """As many as the gateway's prompt has."""
    return [7] * (100 + len(messages) // 2 * (REPLY + RESULT))


async def play(call: Callable[..., Awaitable[Any]], results: Sequence[str], *, seed: int) -> list[float]:
    """Milliseconds of each call of all sessions; `call` is given a conversation and its session's number."""

    async def session(number: int) -> list[float]:
        chance, taken = random.Random(f"{seed}-{number}"), []
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"Search for {number}."}]
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
        served(serve_least, (engine, folder / "least.sqlite")) as least,
        Program("gateway", "--upstream", engine, *words) as gateway,
    ):
        gateway.says("each attempt at a task")
        url = re.findall(r"http://[\d.]+:\d+(?=/e/NAME)", gateway.output)[0]
        found = asyncio.run(_rounds(url, engine, least, gateway.id, results, rounds))
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
    url: str, engine: str, least: str, gateway: int, results: Sequence[str], rounds: int
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
            body = generate_body("m", made_ids(messages), temperature=1.0, max_new_tokens=1000)
            await post(engine + GENERATE, body)
            return SAID

        async def through(messages: list[dict[str, Any]], session: int, *, path: str) -> Any:
            body = {"model": "policy", "messages": messages, "tools": [SEARCH]}
            return (await post(path.format(f"{number}-{session}"), body))["message"]

        for number in range(rounds + 1):
            before = await play(directly, results, seed=number)
            between = await play(partial(through, path=least), results, seed=number)
            used = sum(process.cpu_times()[:2])
            behind = await play(partial(through, path=url + "/e/{}/v1/chat/completions"), results, seed=number)
            if number:  # the first warms up
                added += [b - a for a, b in zip(before, behind, strict=True)]
                bound += [b - a for a, b in zip(before, between, strict=True)]
                cpu += 1000 * (sum(process.cpu_times()[:2]) - used)
    by, of_least = (statistics.quantiles(each, n=100) for each in (added, bound))
    shown = {"added_ms_p50": by[49], "added_ms_p99": by[98], "least_ms_p50": of_least[49], "least_ms_p99": of_least[98]}
    return {**shown, "cpu_ms": cpu / len(added)}


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
