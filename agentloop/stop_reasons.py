"""The names of what ends an episode, and which of them are an end."""

from __future__ import annotations

from context.strategies import CONTEXT_FULL, SUMMARY_TOO_LONG

TRUNCATED = "truncated"
MAX_TURNS = "max_turns"
ENGINE_FAILURE = "engine_failure"
CALLED_LAST = "tool_calls"
"""Of an imported conversation whose last reply calls a tool."""

CUT_OFF = frozenset({TRUNCATED, MAX_TURNS, CONTEXT_FULL, SUMMARY_TOO_LONG, CALLED_LAST})
"""Limits on tokens and turns, and records that stop short: from the state they leave, an episode could have gone on.
Whatever is not named here is an end of the task itself, imported reasons too."""
