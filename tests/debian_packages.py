"""Installs packages that tests need, through apt, where this machine lets us. Needs nothing but Python."""

from __future__ import annotations

import os
import shutil
import subprocess

_FETCH = ("apt-get", "-qq", "-o", "Acquire::Retries=2", "-o", "Acquire::http::Timeout=30")
_LIMIT_S = 600


def install(*packages: str) -> str:
    """Why they can't be had, or nothing."""
    if not shutil.which("apt-get"):
        return "there is no apt-get here"
    root = os.geteuid() == 0
    if not root and (not shutil.which("sudo") or _runs(["sudo", "-n", "true"])):
        return "only root may install packages, and sudo wants a password"
    before = [] if root else ["sudo", "-n"]
    environment = ["env", "DEBIAN_FRONTEND=noninteractive"]
    update = [*before, *environment, *_FETCH, "update"]
    fetch = [*before, *environment, *_FETCH, "install", "-y", "--no-install-recommends", *packages]
    # Lists that are there may be old, or missing: only then are they fetched.
    return _runs(fetch) and (_runs(update) or _runs(fetch))


def _runs(command: list[str]) -> str:
    """What went wrong, in a line, or nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{command[-1]} took more than {_LIMIT_S} s"
    lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
    return "" if done.returncode == 0 else lines[-1]
