"""The control of one vLLM server: its weights, its adapters, and what it says of tokens.

Control routes ask for no key and change the policy: a server that has them must be reachable from its own machine only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2

from agentloop.errors import UserError, one_line, shortened

ASLEEP = "asleep"
"""What an engine calls weights that it has discarded."""
LIKELIEST = 20
"""Most next tokens that vLLM gives the log-probs of."""
_GENERATE, _COMPLETIONS = "/inference/v1/generate", "/v1/completions"
_TOKEN_ID = "token_id:"
_CONNECT_S = 5.0
_HEALTH_S = 5.0


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
    label: str | None
    """What it calls the weights that sampled; None where its route does not say."""


@contextmanager
def _understood(url: str, path: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise EngineRefused(
            f"the engine at {url} must answer {path} as vLLM does, got {one_line(error)} in its answer. "
            "Use a version of vLLM that docs/real-models.md names."
        ) from error


class EngineControl:
    """A server at `url`, which calls its model `model`. Calls wait at most `timeout_s`; none is made twice."""

    def __init__(self, url: str, *, model: str, key: str | None = None, timeout_s: float = 300.0) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self._client = httpx2.Client(
            base_url=self.url,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx2.Timeout(timeout_s, connect=_CONNECT_S),
            # After an error the server closes its end without a word: no connection serves twice.
            limits=httpx2.Limits(max_keepalive_connections=0),
            trust_env=False,
        )
        self._route = _GENERATE
        self._asleep: list[str] = []
        self.wake_s = 0.0
        """Seconds that it took to wake up when it last did."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def healthy(self) -> bool:
        """True: it says that its engine is alive, and its engine says so itself.

        The server says it of an engine that stands still too; whether it is paused, only the engine knows.
        """
        try:
            alive = self._client.get("/health", timeout=_HEALTH_S).status_code == 200
            self._client.get("/is_paused", timeout=_HEALTH_S)
        except httpx2.HTTPError:
            return False
        return alive

    def version(self) -> str:
        """vLLM's."""
        return str(self._asked("GET", "/version")["version"])

    def number_type(self) -> str:
        """In which it holds its weights and multiplies: bfloat16, float16 or float32."""
        path = "/server_info"
        answer = self._asked("GET", path, params={"config_format": "json"})
        with _understood(self.url, path):
            return str(answer["vllm_config"]["model_config"]["dtype"]).removeprefix("torch.")

    def label(self) -> str:
        """What the server calls its weights: "default" until somebody named them."""
        return str(self._asked("GET", "/weight_info")["weight_version"])

    def name_weights(self, label: str) -> None:
        """From now on the server calls its weights `label`."""
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
            raise EngineRefused(f"{error} Start the engine anew: its weights are gone.", status=error.status) from error
        self._wake("kv_cache")  # only now: while weights come, they take more than their place
        # Keys and values of the old weights; replies under way get theirs made anew.
        self._asked("POST", "/reset_prefix_cache", params={"reset_running_requests": "true"})
        self.name_weights(label)
        self.resume()

    def adapters(self) -> list[str]:
        """Names of the LoRA adapters that it has."""
        cards = self._asked("GET", "/v1/models")["data"]
        return [str(card["id"]) for card in cards if card.get("parent") is not None]

    def load_adapter(self, name: str, folder: Path) -> None:
        self._wake("weights")
        self._asked("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder.resolve())})
        self._wake("kv_cache")

    def unload_adapter(self, name: str) -> None:
        """Replies that it samples finish with it."""
        self._asked("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def tokenize(self, text: str) -> list[int] | None:
        """The ids that the server's own tokenizer makes of `text`; None where it has none to ask."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            return list(map(int, self._asked("POST", "/tokenize", body)["tokens"]))
        except EngineRefused as error:
            if error.status in (403, 404, 405, 501):
                return None
            raise

    def scored(self, row: Sequence[int], *, temperature: float, model: str, whole: bool = True) -> Scored:
        """The row is scored, but for `whole=False`, and a token after it is sampled as in a rollout."""
        if self._route == _GENERATE:
            try:
                return self._generated(row, temperature, model, whole)
            except EngineRefused as error:
                # Without --enable-scale-out the route is closed; an unknown model is 404 on either.
                if error.status not in (403, 404):
                    raise
            found = self._completed(row, temperature, model, whole)
            self._route = _COMPLETIONS
            return found
        return self._completed(row, temperature, model, whole)

    def _generated(self, row: Sequence[int], temperature: float, model: str, whole: bool) -> Scored:
        body = {
            "model": model,
            "token_ids": list(row),
            "sampling_params": {**_scoring(temperature, whole), "detokenize": False},
        }
        answer = self._asked("POST", _GENERATE, body)
        with _understood(self.url, _GENERATE):
            (choice,) = answer["choices"]
            (token,) = choice["logprobs"]["content"]
            (span,) = choice["weight_versions"]
            following = {int(entry["token_id"]): float(entry["logprob"]) for entry in token["top_logprobs"]}
            given = _of_row(row, answer["prompt_logprobs"]) if whole else ()
            return _some(Scored(given, following, answer["model"], str(span["version"])))

    def _completed(self, row: Sequence[int], temperature: float, model: str, whole: bool) -> Scored:
        body = {
            "model": model,
            "prompt": list(row),
            **_scoring(temperature, whole),
            "return_tokens_as_token_ids": True,
        }
        answer = self._asked("POST", _COMPLETIONS, body)
        with _understood(self.url, _COMPLETIONS):
            (choice,) = answer["choices"]
            (token,) = choice["logprobs"]["top_logprobs"]
            following = {int(name.removeprefix(_TOKEN_ID)): float(value) for name, value in token.items()}
            given = _of_row(row, choice["prompt_logprobs"]) if whole else ()
            return _some(Scored(given, following, answer["model"], None))

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


def _scoring(temperature: float, whole: bool) -> dict[str, Any]:
    """The whole distribution is sampled from, whatever the model's generation_config.json says."""
    wanted = {"max_tokens": 1, "logprobs": LIKELIEST, **({"prompt_logprobs": 0} if whole else {})}
    return {"temperature": temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0, **wanted}


def _of_row(row: Sequence[int], answered: Sequence[Any]) -> tuple[float, ...]:
    """Each token's own log-prob; the first has none."""
    pairs = zip(row[1:], answered[1:], strict=True)
    return tuple(float(entry[str(token)]["logprob"]) for token, entry in pairs)


_DEVELOPER_PATHS = ("/weight_info", "/pause", "/collective_rpc", "/update_weight_version", "/server_info")
_DEVELOPER = " Start it with VLLM_SERVER_DEV_MODE=1."
_ADAPTERS = " Start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."


def _some(found: Scored) -> Scored:
    if not found.following:
        raise ValueError("no log-probs")
    return found


def _advice(status: int, path: str) -> str:
    if status == 401:
        return " Give this side the --api-key that it was started with."
    if status == 404 and path in _DEVELOPER_PATHS:
        return _DEVELOPER
    return _ADAPTERS if status == 404 and path == "/v1/load_lora_adapter" else ""
