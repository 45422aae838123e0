"""Installs what a sandbox needs, where this machine lets us; `make setup-sandbox`. Needs nothing but Python."""

from __future__ import annotations

import shutil
import sys

from tests.debian_packages import install

PACKAGES = ("bubblewrap", "util-linux")


def main() -> int:
    if there := shutil.which("bwrap"):
        print(f"sandbox: {there} is there; nothing was installed")
        return 0
    trouble = install(*PACKAGES)
    if there := shutil.which("bwrap"):
        print(f"sandbox: installed {there}")
        return 0
    print(f"sandbox: could not be installed: {trouble or 'no bwrap came of it'}. Install {', '.join(PACKAGES)}.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
