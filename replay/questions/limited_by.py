"""What limits a run: its metrics say whether it waits for successes, for optimizer steps, or for tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replay.questions.runs import Metrics, finite
from replay.records import stored_setting

_NEWEST = 8
"""Iterations that are looked at."""
_FEW_SUCCESSES = 1 / 3
"""Fewer per batch: waiting for them takes longer than learning from them."""
_MUCH = 0.3
"""A share from which on it is what to look at."""
_ADVICE = {
    "successes": "Fewer episodes per batch don't help: try replay.hindsight where the environment can say what failed "
    "episodes did solve, or easier tasks first (tasks.curriculum)",
    "tools": "Try collection.max_staleness 1 or more, so that the policy learns while tools work",
    "repeated tool calls": "Declare tools deterministic where they are (@tool(deterministic=True)): repeated calls are "
    "then answered from memory",
    "optimizer steps": "Try a smaller batch, then batch.ppo_epochs 2, then replay on top of it (shortfall: shrink)",
}


@dataclass(frozen=True)
class Regime:
    """What a run waits for, by its newest iterations."""

    limit: str
    """successes | tools | repeated tool calls | optimizer steps"""
    text: str
    """The numbers that say so, and what to do about it."""


def regime(metrics: Metrics, config: Mapping[str, Any]) -> Regime | None:
    """None where no iteration was made."""
    success, fresh = _mean(metrics, "rollout/success"), _mean(metrics, "batch/fresh")
    if success is None or fresh is None:
        return None
    waiting, flat = _mean(metrics, "time/in_tools"), _mean(metrics, "rollout/groups_without_signal")
    repeated, from_memory = _mean(metrics, "tools/repeated"), _mean(metrics, "tools/replayed")
    expected = _count(success * fresh)
    facts = [f"{expected} {'success' if expected == '1' else 'successes'} expected per batch of fresh episodes"]
    if flat is not None:
        facts.append(f"{_percent(flat)} of the groups without a signal")
    if repeated is not None:
        answered = "" if from_memory is None else f", {_percent(from_memory)} answered from memory"
        facts.append(f"{_percent(repeated)} of the tool calls repeated{answered}")
    if waiting is not None:
        facts.append(f"{_percent(waiting)} of an episode's time in tools, {_percent(1 - waiting)} in replies")
    limit = "optimizer steps"
    if success * fresh < _FEW_SUCCESSES:
        limit = "successes"
    elif waiting is not None and waiting > _MUCH:
        could_be_remembered = from_memory is None and repeated is not None and repeated > _MUCH
        limit = "repeated tool calls" if could_be_remembered else "tools"
    advice = _ADVICE[limit]
    if limit == "successes" and stored_setting(config, "replay.hindsight.enable", bool):
        advice = "Hindsight is on, which is what helps; an easier start (tasks.curriculum, sft) may help too"
    return Regime(limit, f"{'; '.join(facts)}. {advice}: docs/evidence.md.")


def _mean(metrics: Metrics, name: str) -> float | None:
    values = [value for _, value in finite(metrics, name)][-_NEWEST:]
    return sum(values) / len(values) if values else None


def _count(expected: float) -> str:
    return f"{expected:,.0f}" if expected >= 10 else f"{expected:.2g}"


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")
