"""The control of one vLLM server: its weights, its adapters, and what it says of tokens.

Control routes ask for no key and change the policy: a server that has them must be reachable from its own machine only.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from agentloop.engines.remote.server_facts import CONNECT_TIMEOUT_S, key_headers
from agentloop.engines.remote.vllm_protocol import GENERATE, EngineFault, generate_body, read_reply
from agentloop.errors import UserError, one_line, shortened

ASLEEP = "asleep"
"""What an engine calls weights that it has discarded."""
LIKELIEST = 20
"""Most next tokens that vLLM gives the log-probs of."""
_HEALTH_S = 5.0
_DEVELOPER_PATHS = ("/weight_info", "/pause", "/collective_rpc", "/update_weight_version", "/server_info")


class EngineRefused(UserError):
    """The server does not do what it was asked to."""

    def __init__(self, text: str, *, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        """Of the answer; None where none came."""


@dataclass(frozen=True)
class Scored:
    """What an engine says of a row of tokens, in nats."""

    log_probs: tuple[float, ...]
    """Of each token but the first, at temperature 1."""
    following: Mapping[int, float]
    """Of the likeliest tokens after the row and of the one it sampled, as in a rollout."""
    model: str | None
    label: str


class EngineControl(AbstractContextManager["EngineControl"]):
    """A server at `url`, which calls its model `model`. Calls wait at most `timeout_s`; none is made twice."""

    def __init__(self, url: str, *, model: str, key: str | None = None, timeout_s: float = 300.0) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self._client = httpx2.Client(
            base_url=self.url,
            headers=key_headers(key),
            timeout=httpx2.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            # After an error the server closes its end without a word: no connection serves twice.
            limits=httpx2.Limits(max_keepalive_connections=0),
            trust_env=False,
        )
        self._asleep: list[str] = []
        self.wake_s = 0.0
        """Seconds that it took to wake up when it last did."""

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def healthy(self) -> bool:
        """Whether the server says that its engine is alive, and the engine, which may stand still, answers."""
        try:
            alive = self._client.get("/health", timeout=_HEALTH_S).status_code == 200
            self._client.get("/is_paused", timeout=_HEALTH_S)
        except httpx2.HTTPError:
            return False
        return alive

    def version(self) -> str:
        return str(self._asked("GET", "/version")["version"])

    def number_type(self) -> str:
        """The type in which it holds its weights and multiplies: bfloat16, float16 or float32."""
        answer = self._asked("GET", "/server_info", params={"config_format": "json"})
        try:
            return str(answer["vllm_config"]["model_config"]["dtype"]).removeprefix("torch.")
        except (KeyError, TypeError) as error:
            raise self._unlike_vllm("/server_info", one_line(error)) from error

    def label(self) -> str:
        """What the server calls its weights: "default" until somebody named them."""
        return str(self._asked("GET", "/weight_info")["weight_version"])

    def name_weights(self, label: str) -> None:
        self._asked("POST", "/update_weight_version", {"new_version": label})

    def resume(self) -> None:
        self._asked("POST", "/resume")

    def sleep(self, level: int) -> None:
        """It gives its GPU's memory back until it gets new weights; replies under way are aborted.

        At level 1 it moves its weights to the host's memory, at level 2 it discards them; it discards the key-value
        cache at both.
        """
        self._asked("POST", "/sleep", params={"level": str(level), "mode": "abort"})
        self._asleep, self.wake_s = ["weights", "kv_cache"], 0.0
        if level > 1:
            self.name_weights(ASLEEP)

    def _wake(self, part: str) -> None:
        """It takes this part of its memory again, if it sleeps."""
        if part in self._asleep:
            began = time.monotonic()
            self._asked("POST", "/wake_up", params={"tags": part})
            self._asleep.remove(part)
            self.wake_s += time.monotonic() - began

    def reload(self, folder: Path, label: str) -> None:
        """Every weight is read from `folder` and called `label`; replies under way pause meanwhile, then go on.

        Where it fails, the server stays paused: its weights are gone, and the next request would end it.
        """
        arguments = {"weights_path": str(folder.resolve())}
        self._replace([("/collective_rpc", {"method": "reload_weights", "kwargs": arguments})], label)

    def receive(self, update: Mapping[str, Any], label: str) -> None:
        """As `reload`, from memory that `update` gives the handles of; whoever owns it keeps it until this is over."""
        steps: list[tuple[str, Any]] = [
            ("/init_weight_transfer_engine", {"init_info": {"packed": False}}),
            ("/start_weight_update", None),
            ("/update_weights", {"update_info": update}),
            ("/finish_weight_update", None),
        ]
        try:
            self._replace(steps, label)
        except EngineRefused as error:
            advice = "Where memory can't be shared, as in WSL2 and with expandable_segments: engine.transfer: file."
            raise EngineRefused(f"{error} {advice}", status=error.status) from error

    def _replace(self, steps: Sequence[tuple[str, Any]], label: str) -> None:
        self._wake("weights")
        self._asked("POST", "/pause", params={"mode": "keep"})
        try:
            for path, body in steps:
                self._asked("POST", path, body)
        except EngineRefused as error:
            raise EngineRefused(
                f"{error} Start the engine again: its weights are gone.", status=error.status
            ) from error
        self._wake("kv_cache")  # only now: while weights come, they take more than their place
        # Keys and values of the old weights; replies under way get theirs made again.
        self._asked("POST", "/reset_prefix_cache", params={"reset_running_requests": "true"})
        self.name_weights(label)
        self.resume()

    def adapters(self) -> list[str]:
        cards = self._asked("GET", "/v1/models")["data"]
        return [str(card["id"]) for card in cards if card.get("parent") is not None]

    def load_adapter(self, name: str, folder: Path) -> None:
        self._wake("weights")
        self._asked("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder.resolve())})
        self._wake("kv_cache")

    def unload_adapter(self, name: str) -> None:
        """Replies that it samples finish with it."""
        self._asked("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def scored(self, row: Sequence[int], *, temperature: float, model: str, whole: bool = True) -> Scored:
        """Sample a token after the row as in a rollout, and score the row itself unless `whole` is False."""
        body = generate_body(
            model, row, temperature=temperature, max_new_tokens=1, likeliest=LIKELIEST, scores_prompt=whole
        )
        answer = self._asked("POST", GENERATE, body)
        try:
            reply = read_reply(answer)
            pairs = zip(row[1:], reply.prompt[1:], strict=True) if whole else ()
            given = tuple(float(entry[str(token)]["logprob"]) for token, entry in pairs)
            (label,) = [span.label for span in reply.spans]
        except (EngineFault, KeyError, TypeError, ValueError) as error:
            raise self._unlike_vllm(GENERATE, str(error) or one_line(error)) from error
        if not reply.likeliest:
            raise self._unlike_vllm(GENERATE, "no log-probs")
        return Scored(given, reply.likeliest, reply.model, label)

    def _unlike_vllm(self, path: str, found: str) -> EngineRefused:
        return EngineRefused(
            f"the engine at {self.url} must answer {path} as vLLM does, got {found} in its answer. "
            "Use a version of vLLM that docs/real-models.md names."
        )

    def _asked(self, method: str, path: str, body: Any = None, params: Mapping[str, str] | None = None) -> Any:
        """The answer's JSON, None where it is not JSON. Raises EngineRefused."""
        try:
            answer = self._client.request(method, path, json=body, params=params)
        except httpx2.HTTPError as error:
            raise EngineRefused(f"the engine at {self.url} must answer {path}, got {one_line(error)}.") from error
        if answer.status_code != 200:
            raise EngineRefused(
                f"the engine at {self.url} must do {path}, got status {answer.status_code}: "
                f"{shortened(answer.text)}.{_advice(answer.status_code, path)}",
                status=answer.status_code,
            )
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return answer.json() if is_json and answer.content else None


def _advice(status: int, path: str) -> str:
    if status == 401:
        return " Give this side the --api-key that it was started with."
    if status == 404 and path in _DEVELOPER_PATHS:
        return " Start it with VLLM_SERVER_DEV_MODE=1."
    if status == 403 and path == GENERATE:
        return " Start it with --enable-scale-out."
    if status == 404 and path == "/v1/load_lora_adapter":
        return " Start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."
    return ""
