"""The control of one vLLM server: its weights, its adapters, and its log-probs of given tokens.

Control routes change the policy and ask for no key: only the server's own machine may reach it.
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
"""An engine's label for weights that it has discarded."""
LIKELIEST = 20
"""The most next tokens for which vLLM gives log-probs."""
_HEALTH_S = 5.0
_DEVELOPER_PATHS = ("/weight_info", "/pause", "/collective_rpc", "/update_weight_version", "/server_info")


class EngineRefused(UserError):
    """The server has refused a call, or did not answer it."""

    def __init__(self, text: str, *, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        """The answer's HTTP status; None where no answer came."""


@dataclass(frozen=True)
class Scored:
    """An engine's log-probs for a row of tokens, in nats."""

    log_probs: tuple[float, ...]
    """Log-probs at temperature 1 of each token but the first."""
    following: Mapping[int, float]
    """Log-probs of the likeliest next tokens and of the sampled one, at the rollout's temperature."""
    model: str | None
    label: str


class EngineControl(AbstractContextManager["EngineControl"]):
    """Controls a server at `url` whose model is named `model`. Calls wait at most `timeout_s`; none is repeated."""

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
        """Seconds that the last wake-up took."""

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def healthy(self) -> bool:
        """True if the server says that its engine lives, and the engine, which may hang, answers."""
        try:
            alive = self._client.get("/health", timeout=_HEALTH_S).status_code == 200
            self._client.get("/is_paused", timeout=_HEALTH_S)
        except httpx2.HTTPError:
            return False
        return alive

    def version(self) -> str:
        return str(self._call("GET", "/version")["version"])

    def number_type(self) -> str:
        """Return the type in which it stores weights and multiplies: bfloat16, float16 or float32."""
        answer = self._call("GET", "/server_info", params={"config_format": "json"})
        try:
            return str(answer["vllm_config"]["model_config"]["dtype"]).removeprefix("torch.")
        except (KeyError, TypeError) as error:
            raise self._unlike_vllm("/server_info", one_line(error)) from error

    def label(self) -> str:
        """Return the server's label for its weights: "default" until somebody has named them."""
        return str(self._call("GET", "/weight_info")["weight_version"])

    def name_weights(self, label: str) -> None:
        self._call("POST", "/update_weight_version", {"new_version": label})

    def resume(self) -> None:
        self._call("POST", "/resume")

    def sleep(self, level: int) -> None:
        """Free the GPU's memory until new weights come; unfinished replies are aborted.

        Level 1 moves the weights to the host's memory, level 2 discards them. Both discard the key-value cache.
        """
        self._call("POST", "/sleep", params={"level": str(level), "mode": "abort"})
        self._asleep, self.wake_s = ["weights", "kv_cache"], 0.0
        if level > 1:
            self.name_weights(ASLEEP)

    def _wake(self, part: str) -> None:
        """Allocate this part of the engine's memory again, if the engine is asleep."""
        if part in self._asleep:
            began = time.monotonic()
            self._call("POST", "/wake_up", params={"tags": part})
            self._asleep.remove(part)
            self.wake_s += time.monotonic() - began

    def reload(self, folder: Path, label: str) -> None:
        """Load all weights from `folder` and name them `label`; unfinished replies pause, then continue.

        After a failure the server stays paused: its weights are gone, and the next request would end it.
        """
        arguments = {"weights_path": str(folder.resolve())}
        self._replace([("/collective_rpc", {"method": "reload_weights", "kwargs": arguments})], label)

    def receive(self, update: Mapping[str, Any], label: str) -> None:
        """Load all weights as `reload` does, from memory that stays allocated meanwhile. `update` has its handles."""
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
        self._call("POST", "/pause", params={"mode": "keep"})
        try:
            for path, body in steps:
                self._call("POST", path, body)
        except EngineRefused as error:
            raise EngineRefused(
                f"{error} Start the engine again: its weights are gone.", status=error.status
            ) from error
        self._wake("kv_cache")  # only now: weights need more memory while they are loaded
        # The cache has keys and values of the old weights; unfinished replies compute theirs again.
        self._call("POST", "/reset_prefix_cache", params={"reset_running_requests": "true"})
        self.name_weights(label)
        self.resume()

    def adapters(self) -> list[str]:
        cards = self._call("GET", "/v1/models")["data"]
        return [str(card["id"]) for card in cards if card.get("parent") is not None]

    def load_adapter(self, name: str, folder: Path) -> None:
        self._wake("weights")
        self._call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder.resolve())})
        self._wake("kv_cache")

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Replies that it is sampling finish with it."""
        self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def score_tokens(self, row: Sequence[int], *, temperature: float, model: str, whole: bool = True) -> Scored:
        """Sample a token after the row as in a rollout, and score the row itself unless `whole` is False."""
        body = generate_body(
            model, row, temperature=temperature, max_new_tokens=1, likeliest=LIKELIEST, scores_prompt=whole
        )
        answer = self._call("POST", GENERATE, body)
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

    def _call(self, method: str, path: str, body: Any = None, params: Mapping[str, str] | None = None) -> Any:
        """Make a call and return the answer's JSON, or None if the answer is no JSON. Raises EngineRefused."""
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
