"""A diagnosis of a run by its metrics: what goes wrong, or else what limits its progress."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from replay.questions.runs import Metrics, Series, finite
from replay.records import stored_setting

_NEWEST = 8
"""Means are over this many of the newest iterations."""
_FEW_SUCCESSES = 1 / 3
"""With fewer successes per batch, the run is limited by successes."""
_MUCH = 0.3
"""A share above this limits the run."""
TOO_FAST, _ALIKE, NO_SIGNAL = "learning rate", "equal groups", "equal rewards"
_ADVICE = {
    "successes": "Fewer episodes per batch don't help: try replay.hindsight where the environment can say what failed "
    "episodes did solve, or an easier start (agentloop sft, shorter tasks)",
    "tools": "Try replay.fraction 0.25, which takes fewer episodes, or collection.by workers (rollout.engine vllm) "
    "with collection.max_staleness 1 or more, so that the policy learns while tools work",
    "repeated tool calls": "Declare tools deterministic where they are (@tool(deterministic=True)): repeated calls are "
    "then answered from memory",
    _ALIKE: "Other tasks, a higher rollout.temperature or, after sft, fewer sft.epochs make attempts at a task differ",
    "optimizer steps": "Try a smaller batch, then batch.ppo_epochs 2, then replay on top of it (shortfall: shrink)",
}


@dataclass(frozen=True)
class Regime:
    """What goes wrong in a run or limits its progress, judged by its newest iterations."""

    limit: str
    """learning rate | equal groups | equal rewards | successes | tools | repeated tool calls | optimizer steps"""
    text: str
    """The numbers that show it, and what to do about it."""


_SUCCESS, _FLAT, _FAILED = "rollout/success", "rollout/groups_without_signal", "rollout/groups_all_failed"
_MOVED = ("actor/fresh/approx_kl", "actor/replay/approx_kl")
_ESS = "actor/replay/ess"
_STEPS, _SKIPPED = "actor/grad_norm", "actor/skipped_no_signal"
SIGNS = ("eval/success", "eval/tasks", "batch/fresh", _SUCCESS, _FLAT, _ESS, *_MOVED, _STEPS, _SKIPPED)
"""The metrics that `trouble` reads."""
_CLEARLY = 4.0
"""Two evaluations differ clearly by this many standard errors. Among many evaluations, some differ by two."""
_NO_CHANCE = 1e-4
_FAR = 0.5  # nats per token between the policy and its samples; healthy runs stay below 0.1
_SOME, _MOST = 0.1, 0.75
"""Shares of groups or of successes. A share below the first may be 0 by chance; above the second, tasks are solved."""


def trouble(metrics: Metrics, config: Mapping[str, Any], *, at_end: bool = False) -> Regime | None:
    """Why training goes wrong and what helps, in a few words; None if no metric clearly shows trouble.

    `at_end` of a run, few iterations suffice to say that none of them changed the policy.
    """
    held_out, tasks, fresh, success, flat, ess, *moved, steps, skipped = (finite(metrics, name) for name in SIGNS)
    size, sign = stored_setting(config, "batch.group_size", int) or 1, None
    groups = {iteration: rows / size for iteration, rows in fresh}
    fall = _fall(held_out, dict(tasks)) or _end(success, groups)
    recent = success[-1][0] - _NEWEST if success else 0
    before = [value for _, value in success[:-1]]
    halved = bool(before) and _SOME < fmean(before) >= 2 * success[-1][1]
    far = max((value for series in moved for at, value in series if at > recent), default=0.0)
    if fall is not None:
        sign = f"success fell from {_percent(fall[0])} to {_percent(fall[1])}"
    elif halved and far > _FAR:
        sign = f"success fell to {_percent(success[-1][1])}, and updates moved the policy by {far:.1f} nats a token"
    elif ess and halved and ess[-1][0] > recent and ess[-1][1] < 0.1:
        sign = f"replay ESS is {ess[-1][1]:.2f}: hardly a replayed token fits the policy any more"
    if sign is not None:
        rate = stored_setting(config, "optimizer.learning_rate", float)
        setting = "a lower learning rate" if rate is None else f"--set optimizer.learning_rate={rate / 10:g}"
        remedy = f"The learning rate is probably too high. Begin again with {setting}: docs/reading-a-run.md."
        return Regime(TOO_FAST, f"{sign}. {remedy}")
    if len(skipped) >= (1 if at_end else _NEWEST) and not steps and all(count > 0 for _, count in skipped):
        during = "1 iteration" if len(skipped) == 1 else f"{len(skipped)} iterations"
        sign = f"no update has changed the policy in {during}: attempts at a task had equal rewards"
        remedy = "Check the rewards (agentloop env check), or take tasks that are solved sometimes"
        return Regime(NO_SIGNAL, f"{sign}. {remedy}: docs/reading-a-run.md.")
    alike, solved = _mean(metrics, _FLAT), _mean(metrics, _SUCCESS)
    if len(flat) >= _NEWEST and alike is not None and solved is not None and alike > _MOST and _SOME < solved < _MOST:
        sign = f"{_percent(alike)} of the groups have no signal: all attempts at a task end alike"
        remedy = "Less sft (sft.epochs), a higher rollout.temperature or other tasks help: docs/reading-a-run.md."
        return Regime(_ALIKE, f"{sign}. {remedy}")
    return None


def _fall(success: Series, tasks: Mapping[int, float]) -> tuple[float, float] | None:
    """The best and the newest evaluation, if the newest is clearly below a third of the best; otherwise None.

    Clearly means by a test of two proportions with standard error sqrt(2 p (1 - p) / n). p is the mean of both, and n
    the number of tasks: a task counts once, however often it is sampled.
    """
    (at, newest), best = success[-1] if success else (0, 0.0), max((value for _, value in success), default=0.0)
    both = (best + newest) / 2
    error = math.sqrt(2 * both * (1 - both) / tasks.get(at, math.nan))
    return (best, newest) if 3 * newest < best and best - newest >= _CLEARLY * error else None


def _end(success: Series, groups: Mapping[int, float]) -> tuple[float, float] | None:
    """(mean success up to the last success, 0), if the groups since then can't all lack one by chance; otherwise None.

    A group has a success at least as often as an episode is one. Two groups without success are added before, so that
    few groups prove little.
    """
    last = max((iteration for iteration, share in success if share > 0), default=math.inf)
    before = [(share, groups.get(iteration, 0.0)) for iteration, share in success if iteration <= last]
    since = sum(groups.get(iteration, 0.0) for iteration, _ in success if iteration > last)
    having = sum(share * count for share, count in before) / (2 + sum(count for _, count in before))
    return (fmean(share for share, _ in before), 0.0) if (1 - having) ** since < _NO_CHANCE else None


def regime(metrics: Metrics, config: Mapping[str, Any]) -> Regime | None:
    """Say what goes wrong, or else what limits the run. None: it has no iteration yet, or its tasks are solved."""
    if (bad := trouble(metrics, config)) is not None:
        return bad
    success, fresh = _mean(metrics, _SUCCESS), _mean(metrics, "batch/fresh")
    if success is None or fresh is None:
        return None
    waiting, flat, failed = (_mean(metrics, name) for name in ("time/in_tools", _FLAT, _FAILED))
    repeated, from_memory = _mean(metrics, "tools/repeated"), _mean(metrics, "tools/replayed")
    if flat is not None and min(success, flat) > _MOST:
        return None
    expected = _count(success * fresh)
    facts = [f"{expected} {'success' if expected == '1' else 'successes'} expected per batch of fresh episodes"]
    if flat is not None:
        all_failed = "" if failed is None else f", {_percent(failed)} as all attempts failed"
        facts.append(f"{_percent(flat)} of the groups without a signal{all_failed}")
    if repeated is not None:
        answered = "" if from_memory is None else f", {_percent(from_memory)} answered from memory"
        facts.append(f"{_percent(repeated)} of the tool calls repeated{answered}")
    if waiting is not None:
        facts.append(f"{_percent(waiting)} of an episode's time in tools, {_percent(1 - waiting)} in replies")
    limit = "optimizer steps"
    if success * fresh < _FEW_SUCCESSES or (failed is not None and failed > _MOST):
        limit = "successes"
    elif flat is not None and flat > _MOST:
        limit = _ALIKE
    elif waiting is not None and waiting > _MUCH:
        could_be_remembered = from_memory is None and repeated is not None and repeated > _MUCH
        limit = "repeated tool calls" if could_be_remembered else "tools"
    advice = _ADVICE[limit]
    if limit == "successes" and stored_setting(config, "replay.hindsight.enable", bool):
        advice = "Hindsight is on, which is what helps; an easier start (agentloop sft, shorter tasks) may help too"
    return Regime(limit, f"{'; '.join(facts)}. {advice}: docs/evidence.md.")


def _mean(metrics: Metrics, name: str) -> float | None:
    values = [value for _, value in finite(metrics, name)][-_NEWEST:]
    return sum(values) / len(values) if values else None


def _count(expected: float) -> str:
    return f"{expected:,.0f}" if expected >= 10 else f"{expected:.2g}"


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")
