"""The least vLLM whose routes and replies hold what is asked of them."""

from __future__ import annotations

import re

from agentloop.errors import UserError, shortened

LEAST = "0.32"
"""Earlier replies name no weights, and earlier servers do not know `--enable-scale-out`."""


def check_version(version: str, *, key: str, where: str) -> None:
    """Raises UserError, about the setting `key`, unless `where` is of a vLLM that is new enough."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or tuple(map(int, found.groups())) < tuple(map(int, LEAST.split("."))):
        raise UserError(
            f"{key} must be of vLLM {LEAST} or newer, got {shortened(version)} at {where}. "
            f"Install it in vLLM's own environment: pip install 'vllm>={LEAST}'."
        )
