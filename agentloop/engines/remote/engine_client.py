"""Samples from the policy on engines over HTTP."""

import asyncio
import copy
import json
import random
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Self

import httpx2

from agentloop.config import RunConfig
from agentloop.engines.generator import GenerationRequest
from agentloop.engines.remote.server_facts import (
    CONNECT_TIMEOUT_S,
    EngineAway,
    ServerFacts,
    ask_server,
    key_headers,
    read_key,
    trusted_context,
)
from agentloop.engines.remote.serving_urls import UNLABELLED, ServingUrls, Weights
from agentloop.engines.remote.vllm_protocol import (
    GENERATE,
    GONE_FAULTS,
    RETRIED_FAULTS,
    EngineFault,
    FaultKind,
    WireReply,
    check_reply,
    generate_body,
    read_reply,
)
from agentloop.errors import UserError, one_line, shortened
from agentloop.records import Completion, GenerationFailed
from replay.storage.collecting.ticket_records import SERVING, Participant

_LOOK_AGAIN_S = 0.05
_LONGEST_PAUSE_S = 4.0
_Transport = httpx2.AsyncHTTPTransport
"""A transport is enough: a client would add more work to a request than the request itself."""
_WAIT_S, _SAY_AGAIN_S = 2.0, 30.0


@dataclass(frozen=True)
class EngineLimits:
    concurrency: int = 64
    """The most turns at the same time, over all engines."""
    turn_timeout_s: float = 600.0
    """Seconds that a turn may take with all its tries, once it has begun."""
    tries: int = 3
    first_pause_s: float = 0.25
    """Seconds before the second try; each later pause is longer."""
    restart_timeout_s: float = 300.0
    """Seconds within which a lost engine may return. Tries meanwhile are not counted."""
    proof_timeout_s: float = 10.0
    """Seconds that a reply sampled during a publish waits for the proof of the new weights."""


@dataclass(frozen=True)
class _Session:
    """The connections and slots of one event loop."""

    idle: list[_Transport]
    """Unused transports with one connection each. A transport with many would check them all at every request."""
    slots: asyncio.Semaphore


@dataclass
class _Turn:
    request: GenerationRequest
    tried: list[str] = field(default_factory=list)
    """The engine's URL, for each try."""
    counted: int = 0
    """Failed tries that count: on engines that are up, or all of them once an engine is gone for too long."""
    fault: EngineFault | None = None
    """The fault of the last try."""


class RemoteEngine:
    """Samples from engines over HTTP; `published()` names the weights that they serve.

    A wrong reply is never returned: the turn ends in `GenerationFailed`, which names the fault. `faults` counts every
    fault by its name, also where a later try succeeded.
    """

    def __init__(
        self,
        servers: Sequence[ServerFacts],
        *,
        key: str | None,
        stop_ids: frozenset[int],
        vocab_size: int,
        limits: EngineLimits | None = None,
        one_version: bool = False,
    ) -> None:
        """`one_version`: nobody publishes, so weights of any label are the published version."""
        self._servers = {server.url: server for server in servers}
        self._urls = ServingUrls(tuple(self._servers))
        self._key = key
        self._stop_ids, self._vocab_size = stop_ids, vocab_size
        self._limits = limits or EngineLimits()
        self._one_version = one_version
        self._temperature = 1.0
        self._chance = random.Random()
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Session] = weakref.WeakKeyDictionary()
        self.faults: Counter[str] = Counter()

    @property
    def servers(self) -> tuple[ServerFacts, ...]:
        return tuple(self._servers.values())

    @property
    def policy_version(self) -> int:
        if self._urls.newest is None:
            raise RuntimeError("published() must come before anything is sampled")
        return self._urls.newest

    def published(
        self, version: int, name: str | None = None, *, label: str | None = None, urls: Collection[str] | None = None
    ) -> None:
        """Note that the engines at `urls` (None: all) were proved to serve `version`; others continue with theirs.

        `name` is a LoRA adapter, which requests then name as their model. Without it the model itself was reloaded,
        and `label` (None: the version as text) is its label in the server's version spans.
        """
        chosen = self._urls.all if urls is None else urls
        self._urls.set_serving(version, label=label or name or str(version), adapter=name, urls=chosen)

    def use_listed(self, engines: Sequence[Participant]) -> None:
        """Use the engines that the learner lists as serving. One that loads new weights gets no requests meanwhile."""
        listed = {each.id: each.facts for each in engines if each.facts["state"] == SERVING}
        serving = {url: facts for url, facts in listed.items() if url in self._servers}
        for url in self._urls.serving.keys() - serving.keys():
            self.withdraw(url)
        for url, facts in serving.items():
            version, label, adapter = int(facts["version"]), str(facts["label"]), facts["adapter"]
            if self._urls.serving.get(url) != Weights(version, adapter) or label not in self._urls.versions[url]:
                self.published(version, name=adapter, label=label, urls=[url])

    @property
    def serves(self) -> bool:
        """Whether there is an engine to ask now."""
        return bool(self._urls.serving)

    def withdraw(self, url: str) -> None:
        """Use this engine no more until `published` names it again: its weights will change, or it is gone."""
        self._urls.serving.pop(url, None)

    def begin(self, *, seed: int, temperature: float) -> None:
        """Start a batch of episodes. Temperature 0 is greedy.

        The seed is not sent, because vLLM's seeds, one per request, do not make replies repeatable: batches change the
        rounding. On CPU, a seed in a chunked prefill ends the server.
        """
        self._temperature = temperature

    def at_temperature(self, temperature: float) -> Self:
        """Return a view of the same engines that samples at another temperature; all else is shared."""
        other = copy.copy(self)
        other._temperature = temperature
        return other

    async def close(self) -> None:
        """Close this event loop's connections. A later reply opens new ones."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        for transport in () if session is None else session.idle:
            await transport.aclose()

    async def reply(self, request: GenerationRequest) -> Completion:
        """Sample a reply that may be recorded, within `turn_timeout_s`. Raises GenerationFailed without one."""
        session = self._session()
        async with session.slots:
            turn = _Turn(request)
            transport = session.idle.pop() if session.idle else _Transport(verify=trusted_context(), trust_env=False)
            try:
                async with asyncio.timeout(self._limits.turn_timeout_s):
                    return await self._try_until_reply(transport, turn)
            except TimeoutError:
                if turn.tried:
                    self._urls.note_failure(turn.tried[-1])
                last = f"; before it, {turn.fault.kind}: {turn.fault}" if turn.fault else ""
                self.faults[FaultKind.DEADLINE] += 1
            finally:
                session.idle.append(transport)
            raise GenerationFailed(f"{FaultKind.DEADLINE}: no reply within {self._limits.turn_timeout_s:g} s{last}")

    async def _try_until_reply(self, transport: _Transport, turn: _Turn) -> Completion:
        while True:
            while (url := self._urls.choose(turn.request.episode, turn.tried)) is None:
                await asyncio.sleep(_LOOK_AGAIN_S)  # a withdrawn engine returns once it is proved
            turn.tried.append(url)
            try:
                reply = await self._request_reply(transport, url, turn.request)
            except EngineFault as fault:
                turn.fault = fault
                self.faults[fault.kind] += 1
                # A lost engine may return, but only for a while.
                if fault.kind not in GONE_FAULTS or self._urls.note_gone(url) >= self._limits.restart_timeout_s:
                    turn.counted = len(turn.tried) if fault.kind in GONE_FAULTS else turn.counted + 1
                if fault.kind not in RETRIED_FAULTS or turn.counted >= self._limits.tries:
                    raise GenerationFailed(f"{fault.kind}: {fault}") from None
            else:
                self._urls.note_reply(url)
                return reply
            self._urls.note_failure(url)
            doubled = min(self._limits.first_pause_s * 2 ** (len(turn.tried) - 1), _LONGEST_PAUSE_S)
            # The pause is random: a batch's episodes fail together, and should not all return together.
            await asyncio.sleep(doubled * self._chance.uniform(0.5, 1.5))

    async def _request_reply(self, transport: _Transport, url: str, request: GenerationRequest) -> Completion:
        server, weights = self._servers[url], self._urls.serving[url]  # nothing was awaited since the URL was chosen
        body = generate_body(
            weights.adapter or server.model,
            request.prompt_ids,
            temperature=self._temperature,
            max_new_tokens=request.max_new_tokens,
            stop_ids=sorted(self._stop_ids),
            stop=request.stop,
        )
        answer = await self._post(transport, url + GENERATE, body)
        if answer.status_code == httpx2.codes.NOT_FOUND and weights.adapter is not None:
            raise EngineFault(FaultKind.UNPROVED_VERSION, f"the engine has no {weights.adapter!r}: has it restarted?")
        self._check_status(answer)
        try:
            reply = read_reply(json.loads(answer.content))
        except ValueError:
            raise EngineFault(FaultKind.CUT_BODY, f"{len(answer.content)} bytes that are no whole JSON") from None
        await self._wait_for_proof(url, reply, weights)
        return check_reply(
            reply,
            request,
            stop_ids=self._stop_ids,
            vocab_size=self._vocab_size,
            weights=weights,
            versions=None if self._one_version else self._urls.versions[url],
        )

    async def _post(self, transport: _Transport, url: str, body: dict[str, object]) -> httpx2.Response:
        try:
            # Only connecting has a limit here: the turn's own deadline ends the rest.
            limits = {"timeout": {"connect": CONNECT_TIMEOUT_S}}
            asked = httpx2.Request("POST", url, json=body, headers=key_headers(self._key), extensions=limits)
            answer = await transport.handle_async_request(asked)
        except httpx2.TransportError as error:
            raise EngineFault(FaultKind.CONNECTION, one_line(error)) from None
        try:
            await answer.aread()
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise EngineFault(FaultKind.CUT_BODY, one_line(error)) from None
        finally:
            await answer.aclose()
        return answer

    def _check_status(self, answer: httpx2.Response) -> None:
        if answer.status_code == httpx2.codes.OK:
            return
        kind = FaultKind.BUSY if answer.status_code == httpx2.codes.TOO_MANY_REQUESTS else FaultKind.REFUSED
        if answer.status_code >= httpx2.codes.INTERNAL_SERVER_ERROR:
            kind = FaultKind.SERVER_ERROR
        text = answer.text.replace(self._key, "***") if self._key else answer.text  # the server may repeat the key
        raise EngineFault(kind, f"status {answer.status_code}: {shortened(text)}")

    async def _wait_for_proof(self, url: str, reply: WireReply, weights: Weights) -> None:
        """Wait a little for the proof of weights that were published while the reply was sampled."""
        if weights.adapter is not None or self._one_version:
            return
        labels = {span.label for span in reply.spans} - {UNLABELLED}
        waited = 0.0
        while labels - self._urls.versions[url].keys() and waited < self._limits.proof_timeout_s:
            await asyncio.sleep(_LOOK_AGAIN_S)
            waited += _LOOK_AGAIN_S

    def _session(self) -> _Session:
        loop = asyncio.get_running_loop()
        if loop not in self._sessions:
            self._sessions[loop] = _Session([], asyncio.Semaphore(self._limits.concurrency))
        return self._sessions[loop]


def connect_engine(
    config: RunConfig, *, stop_ids: frozenset[int], vocab_size: int, note: Callable[[str], None]
) -> RemoteEngine:
    """Wait until each of `engine.urls` answers. Raises UserError where one does not, or can't be this run's engine."""
    section, key = config.engine, read_key()
    limits = EngineLimits(
        concurrency=section.concurrency,
        turn_timeout_s=section.turn_timeout_s,
        restart_timeout_s=section.restart_timeout_s,
    )
    servers = _answering(config, key, note)
    engine = RemoteEngine(servers, key=key, stop_ids=stop_ids, vocab_size=vocab_size, limits=limits)
    longest = min((s.max_model_len for s in servers if s.max_model_len is not None), default=None)
    if longest is not None and longest < config.context.max_tokens:
        raise UserError(
            f"context.max_tokens must be at most {longest}, what the engines take, got {config.context.max_tokens}. "
            "Lower it, or start the engines with a larger --max-model-len."
        )
    return engine


def _answering(config: RunConfig, key: str | None, note: Callable[[str], None]) -> list[ServerFacts]:
    section = config.engine
    deadline, say_at = time.monotonic() + section.restart_timeout_s, 0.0
    while True:
        try:
            return [ask_server(url, key=key) for url in section.urls]
        except EngineAway as error:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            if time.monotonic() >= say_at:
                note(f"waiting for the engines, for {left:.0f} s at most: {error}")
                say_at = time.monotonic() + _SAY_AGAIN_S
            time.sleep(_WAIT_S)
