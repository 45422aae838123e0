"""An engine is watched: it is started again when it dies, and then it is given the newest policy and proved."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agentloop.engines.publish.engine_control import EngineControl, EngineRefused
from agentloop.engines.publish.proof import publish
from agentloop.engines.publish.published_policy import newest_published, one_publisher
from agentloop.engines.serving.engine_process import EngineProcess
from agentloop.errors import UserError

LOOK_AGAIN_S = 1.0
SILENT_S = 300.0
"""An engine that does not answer for so long is ended: its processes may stand still without being dead. While it
reads weights it says nothing either.
"""
_MOST_STARTS = 5
"""Starts in a row that served nothing."""
_REST_S = 2.0


class EngineWatch:
    """Starts an engine, or attaches to one, and stays with it until `stopped`.

    The newest policy of the folder `policies` is published to it, and proved: each once, until the engine is another.
    """

    def __init__(
        self,
        engine: EngineControl,
        policies: Path | None,
        *,
        say: Callable[[str], None],
        stopped: Callable[[], bool] = lambda: False,
        silent_s: float = SILENT_S,
    ) -> None:
        """`policies` None: nothing is published."""
        self._engine, self._policies = engine, policies
        self._say, self._stopped, self._silent_s = say, stopped, silent_s
        self._done: Path | None = None
        """The policy that was published last."""

    def serve(
        self, command: Sequence[str], environment: Mapping[str, str], *, port: int, log: Path, start_timeout_s: float
    ) -> None:
        """Start it, and again whenever it has died. Raises UserError when it does not come up."""
        failures = 0
        while not self._stopped():
            self._say(f"starting {' '.join(command[:3])} (log: {log})")
            process = EngineProcess(command, environment, port=port, log=log)
            try:
                if not process.wait_until(self._engine.healthy, limit_s=start_timeout_s, stopped=self._stopped):
                    return
                self.begin()
                served = self._stay(process)
            finally:
                process.end()
            failures = 0 if served else failures + 1
            if failures == _MOST_STARTS:
                raise UserError(
                    f"vllm serve must stay up, got {failures} starts in a row that ended before anything was proved. "
                    f"What it says: {log}"
                )
            self._rest()

    def attach(self) -> None:
        """Stay with an engine that somebody else starts."""
        answers = False
        while not self._stopped():
            healthy = self._engine.healthy()
            if healthy and not answers:
                self.begin()
            elif answers and not healthy:
                self._say(f"is gone from {self._engine.url}; waiting until it is back")
            answers = healthy
            if healthy:
                try:
                    self.publish_newest()
                except EngineRefused as error:
                    self._say(str(error))
                    answers = False
            self._rest()

    def begin(self) -> None:
        """The engine has been started: it has no policy of the run's."""
        self._say(f"answers at {self._engine.url}")
        self._done = None

    def publish_newest(self) -> None:
        """Publish what is new. Raises EngineRefused where the engine can't take it."""
        if self._policies is None or newest_published(self._policies) in (None, self._done):
            return
        with one_publisher(self._policies, self._engine.url):
            newest = newest_published(self._policies)
            if newest is None:
                return
            began = time.monotonic()
            try:
                proof = publish(self._engine, newest)
            except EngineRefused:
                raise
            except UserError as error:
                # A later policy may be whole, or reach all of the engine.
                self._say(f"refused: {error}")
            else:
                self._say(
                    f"serves policy {newest.name}, proved in {time.monotonic() - began:.2f} s (loaded in "
                    f"{proof.load_s:.2f}, compared in {proof.prove_s:.2f}): {proof.difference:.1e} nats apart"
                )
            self._done = newest

    def _stay(self, process: EngineProcess) -> bool:
        """Stay until it is gone. True: policies could be published meanwhile."""
        served, answered_at = False, time.monotonic()
        while not self._stopped():
            if process.exit_code is not None:
                self._say(f"has ended with exit code {process.exit_code}: {process.last_error()}")
                return served
            if self._engine.healthy():
                answered_at = time.monotonic()
                try:
                    self.publish_newest()
                    served = True
                except EngineRefused as error:
                    self._say(f"{error} It is started again.")
                    return served
            elif time.monotonic() - answered_at > self._silent_s:
                self._say(f"has said nothing for {self._silent_s:g} s; it is started again")
                return served
            time.sleep(LOOK_AGAIN_S)
        return True

    def _rest(self) -> None:
        end = time.monotonic() + _REST_S
        while not self._stopped() and time.monotonic() < end:
            time.sleep(LOOK_AGAIN_S / 4)
