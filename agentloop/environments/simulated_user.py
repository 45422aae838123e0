"""A user played by a model, or by a script, for use inside `Environment.respond`.

The user's model sees the conversation with the roles exchanged: the policy's replies are messages of a user, and what
the user said is its own replies. It is shown no system message and neither calls nor results of tools, so that it can't
leak what the policy did not tell it.
"""

import asyncio
import json
import os
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

from agentloop.errors import NotJudged, one_line, shortened
from context.messages import Message

_GREETING = "Hi! How can I help you today?"
"""A first message in the policy's name: many chat templates need a message of role `user` before all replies."""


_OTHER_SIDE = {"assistant": "user", "user": "assistant"}


@dataclass
class UserCosts:
    """What a simulated user took in one episode."""

    replies: int = 0
    tokens: int = 0
    """Tokens that the user's model generated, as its server counts them."""
    seconds: float = 0.0
    failures: int = 0


class ScriptedUser:
    """Says the given lines one after the other. After the last one, the policy's reply is the answer."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.costs = UserCosts()
        self._lines = iter(lines)

    async def respond(self, messages: Sequence[Message]) -> str | None:
        line = next(self._lines, None)
        self.costs.replies += line is not None
        return line


class SimulatedUser:
    """A model behind an OpenAI-compatible address that speaks as the user of one episode."""

    def __init__(
        self,
        instructions: str,
        *,
        url: str,
        model: str,
        stop: str = "###STOP###",
        api_key_env: str | None = None,
        max_tokens: int = 256,
        timeout_s: float = 60.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`instructions` say who the user is and what it wants. `url` ends with `/v1`.

        A line that ends with `stop` ends the episode with the policy's last reply. `api_key_env` names the variable of
        the key. `options` are further parts of the request, such as a temperature.
        """
        self.costs = UserCosts()
        self._system = (
            f"{instructions}\nYou are the user. Write only what the user says. When all is done, write {stop}"
        )
        self._url, self._stop, self._timeout_s = url, stop, timeout_s
        key = {} if api_key_env is None else {"authorization": f"Bearer {os.environ.get(api_key_env, '')}"}
        self._headers = {"content-type": "application/json", **key}
        self._body = {"max_tokens": max_tokens, **(options or {}), "model": model}

    async def respond(self, messages: Sequence[Message]) -> str | None:
        """Answer the policy's last reply as the user; None: the user is done.

        Raises NotJudged where the model is away, slow, silent, or does not end within `max_tokens`: the policy can't be
        judged by what a broken user did.
        """
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                said = self._read(await self._ask(messages))
        except TimeoutError:
            self.costs.failures += 1
            raise NotJudged(f"the simulated user said nothing within {self._timeout_s:g} s") from None
        except NotJudged:
            self.costs.failures += 1
            raise
        finally:
            self.costs.seconds += time.perf_counter() - began
        self.costs.replies += 1
        return None if any(line.rstrip().endswith(self._stop) for line in said.splitlines()) else said

    async def _ask(self, messages: Sequence[Message]) -> Any:
        import httpx2  # imported here, because most environments need no network

        body = {**self._body, "messages": [{"role": "system", "content": self._system}, *self._seen(messages)]}
        # Written in ASCII: a model may have said halves of surrogate pairs, which UTF-8 lacks.
        address, content = f"{self._url.rstrip('/')}/chat/completions", json.dumps(body)
        try:
            async with httpx2.AsyncClient(timeout=self._timeout_s, verify=_trusted_context()) as client:
                answer = await client.post(address, content=content, headers=self._headers)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise NotJudged(f"the simulated user at {self._url} is away ({one_line(error)})") from error
        if answer.status_code != 200:
            raise NotJudged(f"the simulated user answered with {answer.status_code}: {shortened(answer.text)}")
        try:
            return answer.json()
        except (ValueError, RecursionError) as error:
            raise NotJudged(f"the simulated user sent no JSON ({error})") from None

    def _read(self, answer: Any) -> str:
        try:
            (choice,) = answer["choices"]
            said, reason = choice["message"]["content"], choice.get("finish_reason")
            self.costs.tokens += int((answer.get("usage") or {}).get("completion_tokens") or 0)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            raise NotJudged(f"the simulated user sent no chat completion: {shortened(json.dumps(answer))}") from None
        if reason == "length":
            raise NotJudged(f"the simulated user did not end within max_tokens={self._body['max_tokens']}")
        if not isinstance(said, str) or not said.strip():
            raise NotJudged("the simulated user said nothing")
        return said

    def _seen(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        seen = [
            (_OTHER_SIDE[said.role], said.content) for said in messages if said.role in _OTHER_SIDE and said.content
        ]
        if not seen or seen[0][0] != "user":
            seen.insert(0, ("user", _GREETING))
        turns = groupby(seen, key=lambda part: part[0])  # many templates refuse two of one role in a row
        return [{"role": role, "content": "\n\n".join(text for _, text in said)} for role, said in turns]


@cache
def _trusted_context() -> ssl.SSLContext:
    """Load the machine's trusted certificates once: it takes 40 ms, in which no other episode continues."""
    return ssl.create_default_context()
