"""A learner and an engine's watcher both publish: one after the other, or one's weights get the other's name."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit


@contextmanager
def one_publisher(policies: Path, url: str) -> Iterator[None]:
    """Within, nobody else on this machine publishes to the engine at `url` out of the folder `policies`.

    Which policy is the newest has to be looked up within, too. Whoever dies lets go.
    """
    policies.mkdir(parents=True, exist_ok=True)
    with (policies / f"publishing-{urlsplit(url).netloc.replace(':', '-')}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
