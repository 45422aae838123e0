"""A small engine that really listens: the routes of vLLM 0.32 that the project uses, over the local generator.

It answers as vLLM does, in what it refuses and in what it passes over in silence: it ignores fields that it does not
know, cuts `max_tokens` to what fits, stops at the model's own end tokens too, and asks its key of `/v1` and
`/inference` alone. Every trap of `engine_traps` is a switch of it.
"""

import asyncio
import base64
import inspect
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.fakes.engine_sampling import Asked, EngineModels, Sampled
from tests.fakes.engine_traps import Refused, Traps, json_answer, spoil
from tests.fakes.scripted_http import running

GUARDED = ("/v1", "/v2", "/inference")
Answered = Callable[[Request, Any], Any]
"""Given a request and its JSON: a response, or what is sent as JSON; or an awaitable of one."""


class EngineServer:
    """The state of one server, which a test may change while it serves."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "tiny",
        key: str | None = None,
        max_model_len: int = 512,
        number_type: str = "float32",
        transfers: bool = False,
    ) -> None:
        """`transfers`: it was started with a `--weight-transfer-config`."""
        self.models = EngineModels(folder, name, number_type)
        self.traps = Traps()
        self.key = key
        self.max_model_len = max_model_len
        self.transfers = transfers
        self.scale_out = True
        """Whether it was started with `--enable-scale-out`, without which `/inference` is forbidden."""
        self.version = "0.32.0"
        self.requests: list[dict[str, Any]] = []
        """The bodies it was sent, for the routes that sample."""
        self.pauses_at: int | None = None
        """How many of them it takes until it is paused."""
        self.most_running = 0
        self.port = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> ASGIApp:
        models = self.models
        ends: dict[str, Answered] = {
            "POST /inference/v1/generate": self._generate,
            "POST /v1/load_lora_adapter": self._load_adapter,
            "POST /v1/unload_lora_adapter": self._unload_adapter,
            "POST /pause": self._pause,
            "POST /resume": self._resume,
            "POST /collective_rpc": self._collective_rpc,
            "POST /update_weight_version": self._name_weights,
            "POST /reset_prefix_cache": lambda *_: models.cached.clear(),
            "POST /sleep": self._sleep,
            "POST /wake_up": lambda request, _: models.wake(request.query_params.getlist("tags")),
            "POST /init_weight_transfer_engine": self._init_transfer,
            "POST /start_weight_update": self._start_update,
            "POST /update_weights": self._update_weights,
            "POST /finish_weight_update": self._finish_update,
            "GET /health": lambda *_: None,
            "GET /version": lambda *_: {"version": self.version},
            "GET /server_info": lambda *_: {"vllm_config": {"model_config": {"dtype": f"torch.{models.number_type}"}}},
            "GET /v1/models": self._list_models,
            "GET /weight_info": lambda *_: {"weight_version": models.label},
            "GET /is_paused": lambda *_: {"is_paused": not models.going.is_set()},
        }
        routes = [Route(path.split()[1], _end(answered), methods=[path.split()[0]]) for path, answered in ends.items()]
        inner = Starlette(routes=routes, exception_handlers={Refused: lambda _, refused: refused.response})

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            """Asks its key of some paths, and of others none."""
            asks = scope["type"] == "http" and self.key and scope["path"].startswith(GUARDED)
            if asks and Headers(scope=scope).get("Authorization") != f"Bearer {self.key}":
                await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
            else:
                await inner(scope, receive, send)

        return guarded

    async def _generate(self, request: Request, body: Any) -> Response:
        if not self.scale_out:
            raise Refused(403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out.")
        params = body["sampling_params"]
        asked = self._asked(body, body.get("token_ids"), params)
        sampled = await self._sampled(request, asked)
        choice: dict[str, Any] = {
            "finish_reason": sampled.finish_reason,
            "token_ids": sampled.token_ids,
            "weight_versions": sampled.spans(),
        }
        if params.get("logprobs") is not None:
            pairs = zip(sampled.token_ids, sampled.log_probs, strict=True)
            scored = [{"token_id": token, "logprob": value} for token, value in pairs]
            choice["logprobs"] = {"content": [{**each, "top_logprobs": [dict(each)]} for each in scored]}
            others = [{"token_id": token, "logprob": value} for token, value in sampled.likeliest.items()]
            choice["logprobs"]["content"][0]["top_logprobs"] += others
        answer: dict[str, Any] = {}
        if params.get("prompt_logprobs") is not None:
            answer["prompt_logprobs"] = self.models.prompt_log_probs(asked)
        usage = {"prompt_tokens": len(asked.prompt)}
        return json_answer(self.traps, {"model": asked.model, "choices": [choice], "usage": usage, **answer})

    def _asked(self, body: dict[str, Any], prompt: Any, params: dict[str, Any]) -> Asked:
        """What is to be sampled. Raises Refused."""
        self.requests.append(body)
        models = self.models
        if len(self.requests) == self.pauses_at:
            models.going.clear()
        if models.asleep:
            # vLLM would keep the request until it is woken.
            raise Refused(500, f"asleep: {', '.join(sorted(models.asleep))}")
        if models.dead:
            raise Refused(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
        name = body.get("model") or models.name
        if name != models.name and name not in models.adapters:
            raise Refused(404, f"The model `{name}` does not exist.")
        if not prompt or any(not 0 <= token < models.vocabulary for token in prompt):
            raise Refused(400, f"token_ids: no token, or one that is out of vocabulary: {str(prompt)[-20:]}")
        if len(prompt) >= self.max_model_len:
            longest = f"longer than the maximum model length of {self.max_model_len}"
            raise Refused(400, f"The decoder prompt (length {len(prompt)}) is {longest}")
        own = models.model.generation_config.eos_token_id
        own_ids = own if isinstance(own, list) else [own]
        return Asked(
            model=name,
            prompt=tuple(prompt),
            temperature=float(1.0 if params.get("temperature") is None else params["temperature"]),
            max_tokens=min(params.get("max_tokens") or 16, self.max_model_len - len(prompt)),
            stop_ids=frozenset([*params.get("stop_token_ids", []), *(i for i in own_ids if i is not None)]),
            likeliest=params.get("logprobs") or 0,
        )

    async def _sampled(self, request: Request, asked: Asked) -> Sampled:
        await spoil(self.traps, request)
        self.most_running = max(self.most_running, self.models.running + 1)
        return await self.models.sample(asked)

    async def _list_models(self, request: Request, body: Any) -> dict[str, Any]:
        models = self.models
        base = {"id": models.name, "parent": None, "max_model_len": self.max_model_len, "root": str(models.folder)}
        adapters = [{"id": name, "root": path, "parent": models.name} for name, path in models.paths.items()]
        return {"object": "list", "data": [base, *adapters]}

    async def _load_adapter(self, request: Request, body: Any) -> None:
        name, path = body["lora_name"], body["lora_path"]
        if name in self.models.adapters:
            raise Refused(400, f"The lora adapter '{name}' has already been loaded.")
        if not (Path(path) / "adapter_config.json").exists():
            raise Refused(404, f"Loading lora {name} failed: No adapter found for {path}")
        self.models.load_adapter(name, path)

    async def _unload_adapter(self, request: Request, body: Any) -> None:
        name = body["lora_name"]
        if name not in self.models.adapters:
            raise Refused(404, f"The lora adapter '{name}' cannot be found.")
        del self.models.adapters[name], self.models.paths[name]

    async def _pause(self, request: Request, body: Any) -> None:
        assert request.query_params["mode"] == "keep"  # replies under way go on later
        self.models.going.clear()

    async def _resume(self, request: Request, body: Any) -> None:
        if self.models.asleep:
            # vLLM would begin to sample with memory that is not there.
            raise Refused(500, f"asleep: {', '.join(sorted(self.models.asleep))}")
        self.models.going.set()

    async def _collective_rpc(self, request: Request, body: Any) -> None:
        assert body["method"] == "reload_weights"
        try:
            self.models.reload(body["kwargs"]["weights_path"])
        except (OSError, ValueError, KeyError) as error:
            raise Refused(500, str(error)) from error

    async def _sleep(self, request: Request, body: Any) -> None:
        self.models.aborts += 1
        while self.models.running:
            await asyncio.sleep(0.005)
        self.models.sleep(int(request.query_params.get("level", "1")))

    async def _init_transfer(self, request: Request, body: Any) -> None:
        if not self.transfers:
            raise Refused(500, "Weight transfer not configured. Please set weight_transfer_config.")
        assert body["init_info"] == {"packed": False}

    async def _start_update(self, request: Request, body: Any) -> None:
        self.models.is_updated = True

    async def _update_weights(self, request: Request, body: Any) -> None:
        info = body["update_info"]
        handles = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))  # noqa: S301  a test has made it
        assert len(info["names"]) == len(info["dtype_names"]) == len(info["shapes"]) == len(handles)
        try:
            self.models.receive(info["names"], handles)
        except (RuntimeError, ValueError) as error:
            raise Refused(500, str(error)) from error

    async def _finish_update(self, request: Request, body: Any) -> None:
        if not self.models.is_updated:
            raise Refused(500, "finish_weight_update called without a matching start_weight_update.")
        self.models.is_updated = False

    async def _name_weights(self, request: Request, body: Any) -> None:
        self.models.label = body["new_version"]


def _end(answered: Answered) -> Callable[[Request], Any]:
    async def end(request: Request) -> Response:
        found = answered(request, await request.json() if await request.body() else None)
        if inspect.isawaitable(found):
            found = await found
        return found if isinstance(found, Response) else JSONResponse(found)

    return end


@contextmanager
def serving(folder: Path, *, port: int = 0, access_log: bool = False, **options: Any) -> Iterator[EngineServer]:
    """A server of the model in `folder`, on a port of 127.0.0.1 (0: a free one), until the end of the block.

    `access_log`: each request is printed, as vLLM does.
    """
    engine = EngineServer(folder, **options)
    level = "info" if access_log else "critical"
    settings = uvicorn.Config(engine.app(), log_level=level, access_log=access_log, timeout_graceful_shutdown=2)
    with running(uvicorn.Server(settings), port=port) as engine.port:
        yield engine
