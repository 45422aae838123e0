"""A small engine that really listens: the routes of vLLM 0.32 that the project uses, over the local generator.

It answers as vLLM does, in what it refuses and in what it passes over in silence: it ignores fields that it does not
know, cuts `max_tokens` to what fits, stops at the model's own end tokens too, and asks its key of `/v1` and
`/inference` alone. Every trap of `engine_traps` is a switch of it.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
import socket
import threading
import time
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
from tests.fakes.engine_traps import Traps, json_answer, spoilt_exchange

GUARDED = ("/v1", "/v2", "/inference")


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
        self.most_running = 0
        self.port = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> ASGIApp:
        post = {
            "/inference/v1/generate": self._generate,
            "/v1/completions": self._completions,
            "/v1/load_lora_adapter": self._load_adapter,
            "/v1/unload_lora_adapter": self._unload_adapter,
            "/pause": self._pause,
            "/resume": self._resume,
            "/collective_rpc": self._collective_rpc,
            "/update_weight_version": self._update_version,
            "/reset_prefix_cache": self._reset_cache,
            "/sleep": self._sleep,
            "/wake_up": self._wake_up,
            "/init_weight_transfer_engine": self._init_transfer,
            "/start_weight_update": self._start_update,
            "/update_weights": self._update_weights,
            "/finish_weight_update": self._finish_update,
        }
        get = {
            "/health": self._health,
            "/version": self._version,
            "/server_info": self._server_info,
            "/v1/models": self._list_models,
            "/weight_info": self._weight_info,
            "/is_paused": self._is_paused,
            "/is_sleeping": self._is_sleeping,
        }
        routes = [Route(path, end, methods=["POST"]) for path, end in post.items()]
        routes += [Route(path, end, methods=["GET"]) for path, end in get.items()]
        inner = Starlette(routes=routes)

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            """Asks its key of some paths, and of others none."""
            asks = scope["type"] == "http" and self.key and scope["path"].startswith(GUARDED)
            if asks and Headers(scope=scope).get("Authorization") != f"Bearer {self.key}":
                await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
            else:
                await inner(scope, receive, send)

        return guarded

    async def _generate(self, request: Request) -> Response:
        if not self.scale_out:
            return refusal(403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out.")
        body = await request.json()
        params = body.get("sampling_params")
        if not isinstance(params, dict):
            return refusal(400, "sampling_params: Field required")
        asked = self._asked(body, body.get("token_ids"), params)
        if isinstance(asked, Asked) and len(asked.prompt) >= self.max_model_len:
            asked = refusal(400, f"The decoder prompt (length {len(asked.prompt)}) is too long{_longest(self)}")
        if isinstance(asked, Response):
            return asked
        if (spoilt := await spoilt_exchange(self.traps, request)) is not None:
            return spoilt
        sampled = await self._sampled(asked)
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": sampled.finish_reason,
            "stop_reason": None,
            "token_ids": sampled.token_ids,
            "logprobs": None,
            "weight_versions": sampled.spans(),
        }
        if params.get("logprobs") is not None:
            pairs = zip(sampled.token_ids, sampled.log_probs, strict=True)
            scored = [{"token_id": token, "logprob": value, "rank": 1} for token, value in pairs]
            choice["logprobs"] = {"content": [{**each, "top_logprobs": [dict(each)]} for each in scored]}
            others = [{"token_id": token, "logprob": value} for token, value in sampled.likeliest.items()]
            choice["logprobs"]["content"][0]["top_logprobs"] += others
        answer = {"request_id": "r", "model": asked.model, "created": 0, "choices": [choice], "output_mode": "tokens"}
        answer |= self._usage(asked, sampled)
        if params.get("prompt_logprobs") is not None:
            answer["prompt_logprobs"] = self.models.prompt_log_probs(asked)
        if body.get("return_token_ids"):
            answer["prompt_token_ids"] = list(asked.prompt)
        return json_answer(self.traps, answer)

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        asked = self._asked(body, body.get("prompt"), body)
        if isinstance(asked, Asked) and len(asked.prompt) >= self.max_model_len:
            asked = refusal(400, f"This prompt has at least {len(asked.prompt)} input tokens{_longest(self)}")
        elif (body.get("max_tokens") or 16) > self.max_model_len:
            asked = refusal(400, f"max_tokens={body['max_tokens']} cannot be greater{_longest(self)}")
        if isinstance(asked, Response):
            return asked
        if (spoilt := await spoilt_exchange(self.traps, request)) is not None:
            return spoilt
        sampled = await self._sampled(asked)
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": sampled.finish_reason, "logprobs": None}
        if body.get("logprobs") is not None:
            named = body.get("return_tokens_as_token_ids")
            tokens = [f"token_id:{token}" if named else "text" for token in sampled.token_ids]
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": sampled.log_probs}
            others = {f"token_id:{token}": value for token, value in sampled.likeliest.items()}
            pairs = zip(tokens, sampled.log_probs, strict=True)
            choice["logprobs"]["top_logprobs"] = [others | {token: value} for token, value in pairs]
        if body.get("return_token_ids"):
            choice |= {"token_ids": sampled.token_ids, "prompt_token_ids": list(asked.prompt)}
        if body.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = self.models.prompt_log_probs(asked)
        answer = {"id": "c", "object": "text_completion", "created": 0, "model": asked.model, "choices": [choice]}
        answer |= self._usage(asked, sampled)
        return json_answer(self.traps, answer)

    def _asked(self, body: dict[str, Any], prompt: Any, params: dict[str, Any]) -> Asked | Response:
        """What is to be sampled, or why it is not."""
        self.requests.append(body)
        if self.models.asleep:
            # vLLM would keep the request until it is woken.
            return refusal(500, f"asleep: {', '.join(sorted(self.models.asleep))}")
        if self.models.dead:
            return refusal(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
        name = body.get("model") or self.models.name
        if name != self.models.name and name not in self.models.adapters:
            return refusal(404, f"The model `{name}` does not exist.")
        if not prompt or not isinstance(prompt, list):
            return refusal(400, "token_ids: List should have at least 1 item after validation, not 0")
        outside = next((token for token in prompt if not 0 <= token < self.models.vocabulary), None)
        if outside is not None:
            return refusal(400, f"Token id {outside} is out of vocabulary")
        own = self.models.model.generation_config.eos_token_id
        own_ids = own if isinstance(own, list) else [own]
        return Asked(
            model=name,
            prompt=tuple(prompt),
            temperature=float(1.0 if params.get("temperature") is None else params["temperature"]),
            max_tokens=min(params.get("max_tokens") or 16, self.max_model_len - len(prompt)),
            stop_ids=frozenset([*params.get("stop_token_ids", []), *(i for i in own_ids if i is not None)]),
            likeliest=params.get("logprobs") or 0,
        )

    async def _sampled(self, asked: Asked) -> Sampled:
        self.most_running = max(self.most_running, self.models.running + 1)
        return await self.models.sample(asked)

    def _usage(self, asked: Asked, sampled: Sampled) -> dict[str, Any]:
        prompt, reply = len(asked.prompt), len(sampled.token_ids)
        return {"usage": {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}}

    async def _list_models(self, request: Request) -> Response:
        models = self.models
        cards = [{"id": models.name, "object": "model", "parent": None, "max_model_len": self.max_model_len}]
        cards[0]["root"] = str(models.folder)
        cards += [{"id": name, "root": path, "parent": models.name} for name, path in models.paths.items()]
        return JSONResponse({"object": "list", "data": cards})

    async def _load_adapter(self, request: Request) -> Response:
        body = await request.json()
        name, path = body["lora_name"], body["lora_path"]
        if name in self.models.adapters and not body.get("load_inplace"):
            return refusal(400, f"The lora adapter '{name}' has already been loaded.")
        if not (Path(path) / "adapter_config.json").exists():
            return refusal(404, f"Loading lora {name} failed: No adapter found for {path}")
        self.models.load_adapter(name, path)
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        if name not in self.models.adapters:
            return refusal(404, f"The lora adapter '{name}' cannot be found.")
        del self.models.adapters[name], self.models.paths[name]
        return Response(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            return refusal(400, f"mode: Input should be 'abort', 'wait' or 'keep', got {mode}")
        self.models.aborts += mode == "abort"
        while mode != "keep" and self.models.running:
            await asyncio.sleep(0.005)
        self.models.going.clear()
        return JSONResponse({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        if self.models.asleep:
            # vLLM would begin to sample with memory that is not there.
            return refusal(500, f"asleep: {', '.join(sorted(self.models.asleep))}")
        self.models.going.set()
        return JSONResponse({"status": "resumed"})

    async def _is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": not self.models.going.is_set()})

    async def _collective_rpc(self, request: Request) -> Response:
        body = await request.json()
        if body.get("method") != "reload_weights":
            return refusal(500, f"Worker has no attribute '{body.get('method')}'")
        try:
            self.models.reload(body.get("kwargs", {})["weights_path"])
        except (OSError, ValueError, KeyError) as error:
            return refusal(500, str(error))
        return JSONResponse({"results": [None]})

    async def _sleep(self, request: Request) -> Response:
        level = int(request.query_params.get("level", "1"))
        self.models.aborts += 1
        while self.models.running:
            await asyncio.sleep(0.005)
        self.models.sleep(level)
        return JSONResponse({"status": "sleeping", "level": level})

    async def _wake_up(self, request: Request) -> Response:
        tags = request.query_params.getlist("tags")
        self.models.wake(tags or ("weights", "kv_cache"))
        return JSONResponse({"status": "sleeping" if self.models.asleep else "awake", "tags": tags or None})

    async def _is_sleeping(self, request: Request) -> Response:
        return JSONResponse({"is_sleeping": not self.models.going.is_set()})

    async def _init_transfer(self, request: Request) -> Response:
        if not self.transfers:
            return refusal(500, "Weight transfer not configured. Please set weight_transfer_config.")
        assert (await request.json())["init_info"] == {"packed": False}
        return JSONResponse({"message": "Weight transfer initialized"})

    async def _start_update(self, request: Request) -> Response:
        self.models.is_updated = True
        return JSONResponse({"message": "Weight update started"})

    async def _update_weights(self, request: Request) -> Response:
        info = (await request.json())["update_info"]
        handles = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))  # noqa: S301  a test has made it
        assert len(info["names"]) == len(info["dtype_names"]) == len(info["shapes"]) == len(handles)
        try:
            self.models.receive(info["names"], handles)
        except (RuntimeError, ValueError) as error:
            return refusal(500, str(error))
        return JSONResponse({"message": "Weights updated"})

    async def _finish_update(self, request: Request) -> Response:
        if not self.models.is_updated:
            return refusal(500, "finish_weight_update called without a matching start_weight_update.")
        self.models.is_updated = False
        return JSONResponse({"message": "Weight update finished"})

    async def _update_version(self, request: Request) -> Response:
        self.models.label = (await request.json())["new_version"]
        return JSONResponse({"success": True, "new_version": self.models.label})

    async def _weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.models.label})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": self.version})

    async def _server_info(self, request: Request) -> Response:
        dtype = f"torch.{self.models.number_type}"
        return JSONResponse({"vllm_config": {"model_config": {"dtype": dtype}}})

    async def _reset_cache(self, request: Request) -> Response:
        self.models.cached.clear()
        return JSONResponse({"success": True})

    async def _health(self, request: Request) -> Response:
        return Response()


def _longest(engine: EngineServer) -> str:
    return f" than the maximum model length of {engine.max_model_len}"


def refusal(code: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "error", "param": None, "code": code}}, code)


@contextmanager
def serving(folder: Path, *, port: int = 0, access_log: bool = False, **options: Any) -> Iterator[EngineServer]:
    """A server of the model in `folder`, on a port of 127.0.0.1 (0: a free one), until the end of the block.

    `access_log`: each request is printed, as vLLM does.
    """
    engine = EngineServer(folder, **options)
    listening = socket.create_server(("127.0.0.1", port), backlog=128)
    engine.port = listening.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(
            engine.app(),
            log_level="info" if access_log else "critical",
            access_log=access_log,
            timeout_graceful_shutdown=2,
        )
    )
    run: Callable[[], None] = lambda: server.run(sockets=[listening])  # noqa: E731
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "the engine never began to listen"
        time.sleep(0.002)
    try:
        yield engine
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
        listening.close()
