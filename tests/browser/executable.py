"""The browser that tests drive: found, or installed where this machine lets us; `make setup-browser`."""

from __future__ import annotations

import os
import shutil
import sys

from tests.debian_packages import install

NAMED = "AGENTLOOP_TEST_BROWSER"
NAMES = ("chromium", "chromium-browser", "google-chrome")


def found() -> str | None:
    """None where there is none."""
    return os.environ.get(NAMED) or next(filter(None, map(shutil.which, NAMES)), None)


def main() -> int:
    if there := found():
        print(f"browser: {there} is there; nothing was installed")
        return 0
    trouble = install("chromium")
    there = found()
    if there:
        print(f"browser: installed {there}")
        return 0
    reason = trouble or f"none of {', '.join(NAMES)} came of it"
    print(f"browser: could not be installed: {reason}. Install chromium, or name a browser with {NAMED}.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
