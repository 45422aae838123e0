"""An agent that asks the policy once, without a client, and then does what its task says: a function, and a program."""

import asyncio
import json
import os
import sys
import threading
from itertools import count
from typing import Any
from urllib.request import Request, urlopen

CALLS, LOOKS = count(), count()


def solve(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    """What the expression `then` of the task gives."""

    def post(path: str, **body: Any) -> None:
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        with urlopen(Request(base_url.removesuffix("/v1") + path, json.dumps(body).encode(), headers)) as answer:
            answer.read()

    def ask() -> None:
        post("/v1/chat/completions", model="policy", messages=[{"role": "user", "content": task["prompt"]}])

    ask()
    further = {"hang": threading.Event().wait, "post": lambda **body: post("/reward", **body), "ask": ask}
    further |= {"LOOKS": LOOKS, "exit": sys.exit}
    return eval(task.get("then", "None"), further)  # noqa: S307  what a test wrote


async def one_of_two(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Every other one asks nothing, and has no end."""
    if next(CALLS) % 2:
        await asyncio.Event().wait()
    return await asyncio.to_thread(solve, task, base_url, api_key)


if __name__ == "__main__":
    print(solve(json.loads(sys.stdin.readline()), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]))
