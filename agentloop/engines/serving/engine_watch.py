"""`agentloop engine` watches one engine, and publishes the newest policy to it with a proof."""

import time
from collections.abc import Callable
from pathlib import Path

from agentloop.engines.publish.engine_control import EngineControl, EngineRefused
from agentloop.engines.publish.proof import publish
from agentloop.engines.publish.published_policy import newest_published, one_publisher
from agentloop.engines.serving.engine_process import START_S, EngineProcess
from agentloop.engines.serving.served_engine import EngineEnded
from agentloop.errors import UserError

LOOK_AGAIN_S = 1.0
SILENT_S = 300.0
"""Seconds without an answer after which an engine is given up: its processes may hang without being dead. It does not
answer while it loads weights, either.
"""


class EngineWatch:
    """Watches an engine until `stopped`, and publishes each newest policy in the folder `policies` to it once."""

    def __init__(
        self,
        engine: EngineControl,
        policies: Path | None,
        *,
        say: Callable[[str], None],
        stopped: Callable[[], bool] = lambda: False,
        silent_s: float = SILENT_S,
    ) -> None:
        """Without `policies` nothing is published."""
        self._engine, self._policies = engine, policies
        self._say, self._stopped, self._silent_s = say, stopped, silent_s
        self._published: Path | None = None

    def serve(self, process: EngineProcess) -> None:
        """Watch the engine that `process` runs. Raises UserError if it does not start, EngineEnded if it dies."""
        if not process.wait_until(self._engine.healthy, limit_s=START_S, stopped=self._stopped):
            return
        self._say(f"answers at {self._engine.url}")
        answered_at = time.monotonic()
        while not self._stopped():
            if process.exit_code is not None:
                raise _ended(f"exit code {process.exit_code}: {process.last_error()}")
            if self._engine.healthy():
                answered_at = time.monotonic()
                try:
                    self.publish_newest()
                except EngineRefused as error:
                    raise _ended(str(error)) from error
            elif time.monotonic() - answered_at > self._silent_s:
                raise _ended(f"no answer for {self._silent_s:g} s.")
            time.sleep(LOOK_AGAIN_S)

    def publish_newest(self) -> None:
        """Publish a newer policy if there is one. Raises EngineRefused where the engine can't load it."""
        if self._policies is None or newest_published(self._policies) in (None, self._published):
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
                # A later policy may succeed.
                self._say(f"refused: {error}")
            else:
                self._say(
                    f"serves policy {newest.name}, proved in {time.monotonic() - began:.2f} s (loaded in "
                    f"{proof.load_s:.2f}, compared in {proof.prove_s:.2f}): {proof.weights.difference:.1e} nats apart"
                )
            self._published = newest


def _ended(found: str) -> EngineEnded:
    return EngineEnded(
        f"vllm serve must go on serving, got {found} Start it again; agentloop launch does so by itself."
    )
