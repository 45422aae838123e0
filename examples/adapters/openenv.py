"""Plays environments on a server of OpenEnv 0.10. Each session is a WebSocket, as HTTP requests share no state.

Copy this file, or name it as it is: `environment.name: examples/adapters/openenv.py:OpenEnv`. It needs
`pip install 'httpx2[ws]'`.
"""

import json
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache
from typing import Any

import httpx2
from httpx2.websockets import HTTPXWSException
from wsproto.utilities import LocalProtocolError

from agentloop import Environment, Message, NotJudged, Observation, Task
from agentloop.environments.tools.results import CRASHED, ToolFailed
from agentloop.environments.tools.tool_schema import tools_of
from agentloop.errors import UserError, one_line

LARGEST_SEED = 2**31 - 1
_MOST_BYTES = 8 << 20
_NEVER_SHOWN = ("metadata",)
_ENDED = "the server has ended"


class OpenEnv(Environment):
    """Tasks are seeds or rows, with which the server resets its environment; each call of `step` is an action."""

    version = "2"

    def __init__(
        self,
        url: str,
        goal: str = "",
        field: str | None = None,
        reset: dict[str, Any] | None = None,
        timeout_s: float = 60.0,
        *,
        plain_text: bool = False,
    ) -> None:
        """`field` is the part of an observation to show; `reset` joins each seed or row; `goal` opens the prompt.

        With `plain_text` a reply is an action, and there is no tool.
        """
        self._goal, self._plain_text = goal, plain_text
        self._part = ""
        """Name of the argument that a reply stands for."""
        self._url, self._field, self._asked, self._timeout_s = url, field, reset or {}, timeout_s
        self._session: AbstractContextManager[Any] | None = None
        self._socket: Any = None

    def make_task(self, rng: random.Random) -> Task:
        return self._task({**self._asked, "seed": rng.randrange(LARGEST_SEED)})

    def task_from_row(self, row: Mapping[str, Any]) -> Task:
        return self._task({**self._asked, **row})

    def _task(self, asked: Mapping[str, Any]) -> Task:
        try:
            return Task(f"{self._goal}\n\n{self._reset(asked)}".strip(), {"reset": asked})
        finally:
            self.close()

    def start(self, task: Task) -> None:
        self._reset(task.payload["reset"])

    def close(self) -> None:
        if self._session is not None:
            self._session.__exit__(None, None, None)
        self._session = None

    def tools_for(self, task: Task) -> list[str | Mapping[str, Any]]:
        own = list(tools_of(type(self)))  # those of MCP servers, if there are any
        if self._plain_text:
            return own
        schema = dict(_action_schema(self._url, self._timeout_s))
        described = " ".join(schema.pop("description", "").split()) or "Act, and see what follows."
        function = {"name": "step", "description": described, "parameters": schema}
        return [*own, {"type": "function", "function": function}]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Observation:
        if self._session is None:
            raise ToolFailed(_ENDED, kind=CRASHED)
        result = self._ask("step", arguments)
        return Observation(self._shown(result), result.get("reward"), over=bool(result.get("done")))

    def respond(self, task: Task, messages: Sequence[Message]) -> Observation | str | None:
        if not self._plain_text:
            return None
        try:
            return self.call_tool("step", {self._part: messages[-1].content.strip()})
        except ToolFailed as error:
            if error.kind == CRASHED:
                raise NotJudged(str(error.problem or error)) from error
            return str(error)

    def _reset(self, asked: Mapping[str, Any]) -> str:
        required = _action_schema(self._url, self._timeout_s)["required"]
        self._part = required[0] if required else ""
        if self._plain_text and len(required) != 1:
            raise UserError(
                "environment.options.plain_text must be false for actions with other than one required part, got "
                f"{', '.join(required) or 'none'}."
            )
        address = f"ws{self._url.removeprefix('http').rstrip('/')}/ws"
        limits: dict[str, Any] = {"max_message_size_bytes": _MOST_BYTES, "keepalive_ping_interval_seconds": None}
        self._session = httpx2.websocket(address, timeout=self._timeout_s, **limits)
        self._socket = self._session.__enter__()
        try:
            return self._shown(self._ask("reset", asked))
        except ToolFailed as error:
            raise UserError(
                f"{self._url} must have a session for each episode and reset it by {dict(asked)}, got: "
                f"{error.problem or error}. Mend the server, let it have more sessions, or lower rollout.parallel."
            ) from error

    def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a request and return its answer. Raises ToolFailed if the session refuses, or has ended."""
        try:
            # A server that refuses a session may have closed it already; its reason can still be read.
            with suppress(LocalProtocolError):
                self._socket.send_text(json.dumps({"type": kind, "data": dict(data)}))
            answer = json.loads(self._socket.receive_text(timeout=self._timeout_s))
        except (TimeoutError, HTTPXWSException, httpx2.HTTPError) as error:
            self.close()
            found = f"no answer within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else one_line(error)
            raise ToolFailed(_ENDED, kind=CRASHED, problem=found) from error
        if answer["type"] == "error":
            raise ToolFailed(str(answer["data"].get("message", answer["data"])))
        return dict(answer["data"])

    def _shown(self, result: Mapping[str, Any]) -> str:
        observation = result["observation"]
        if self._field is None:
            return _as_text({name: value for name, value in observation.items() if name not in _NEVER_SHOWN})
        if self._field not in observation:
            raise UserError(
                f"environment.options.field must be a field of the observations, got {self._field!r} for "
                f"{', '.join(observation)}."
            )
        return _as_text(observation[self._field])


@cache
def _action_schema(url: str, timeout_s: float) -> Mapping[str, Any]:
    try:
        answer = httpx2.get(f"{url.rstrip('/')}/schema", timeout=timeout_s)
        answer.raise_for_status()
        schema = dict(answer.json()["action"])
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"environment.options.url must be an OpenEnv server that runs, got {url!r} with {one_line(error)}. Start "
            "it, or mend the URL."
        ) from error
    properties = {name: part for name, part in schema.get("properties", {}).items() if name not in _NEVER_SHOWN}
    return {**schema, "properties": properties, "required": schema.get("required", [])}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
