"""What Prometheus would read of a role."""

from __future__ import annotations

import urllib.request


def scraped(port: int) -> list[str]:
    """The lines that are served at this port of this machine."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        return reply.read().decode().splitlines()
