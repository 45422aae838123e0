"""Figures of an evaluation against formulas written out by hand."""

import itertools
import math
import random
from dataclasses import replace
from fractions import Fraction

import pytest

from agentloop.cli.text_tables import evaluation_table
from agentloop.config import RunConfig
from agentloop.environments import Task
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.evaluation import Attempts, Evaluated, Evaluation, Outcome, outcome_of, report
from agentloop.runs.confidence_intervals import bootstrap, pass_at_k, pass_hat_k, proportion, wilson
from context import Message


@pytest.mark.parametrize("samples", range(1, 9))
def test_pass_at_k_and_pass_hat_k_are_shares_of_subsets(samples: int) -> None:
    for successes, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        outcomes = [True] * successes + [False] * (samples - successes)
        subsets = list(itertools.combinations(outcomes, k))
        for estimator, rule in ((pass_at_k, any), (pass_hat_k, all)):
            share = Fraction(sum(rule(subset) for subset in subsets), len(subsets))
            assert estimator(samples, successes, k) == pytest.approx(float(share), rel=1e-12, abs=1e-15)


def test_pass_at_k_of_large_and_of_too_few_numbers() -> None:
    assert pass_at_k(4000, 1, 2000) == pytest.approx(0.5)  # numbers of 1200 digits
    with pytest.raises(ValueError, match=r"^k must be from 1 to the number of samples \(5\), got 6\.$"):
        pass_at_k(5, 2, 6)


def test_wilson_interval_by_hand() -> None:
    # 8 of 10, z^2 = 3.8415: centre (0.8 + 0.19207) / 1.38415 = 0.71674,
    # half-width 1.95996 sqrt(0.016 + 0.0096037) / 1.38415 = 0.22658
    found = wilson(8, 10)
    assert (found.value, found.interval) == (0.8, "wilson")
    assert (found.low, found.high) == (pytest.approx(0.49016, abs=1e-5), pytest.approx(0.94332, abs=1e-5))
    assert (wilson(0, 10).low, wilson(10, 10).high) == (0.0, 1.0)
    assert wilson(0, 10).high == pytest.approx(3.841459 / 13.841459)  # z^2 / (n + z^2)


def test_bootstrap_of_a_large_sample_is_near_the_normal_interval() -> None:
    random_values = random.Random(5)
    values = [random_values.random() for _ in range(1000)]
    mean = sum(values) / 1000
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / 1000 / 1000)
    found = bootstrap(values, seed=1)
    assert (found.value, found.interval) == (mean, "bootstrap")
    assert found.low == pytest.approx(mean - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(mean + 1.96 * error, abs=0.1 * error)
    assert found == bootstrap(values, seed=1)
    assert found != bootstrap(values, seed=2)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_proportion_of_tasks_that_all_agree_is_not_certain(share: float) -> None:
    assert proportion([1.0, 0.0, 1.0], single=True, seed=0) == wilson(2, 3)
    assert proportion([0.5, 0.25, 1.0], single=False, seed=0) == bootstrap([0.5, 0.25, 1.0], seed=0)
    found = proportion([share] * 20, single=False, seed=0)
    assert found == wilson(int(20 * share), 20)
    assert found.high - found.low == pytest.approx(3.841459 / 23.841459)


def attempts(successes: int, samples: int, stops: dict[str, int], turns: int = 2) -> Attempts:
    ended = [reason for reason, count in stops.items() for _ in range(count)]
    outcomes = [Outcome(at < successes, float(at < successes), turns, reason, 1) for at, reason in enumerate(ended)]
    assert len(outcomes) == samples
    return Attempts(tuple(outcomes))


PLAYED = Evaluated("runs/a-001", 12, "runs/a-001/checkpoints/000012/model", "trail", "2")
THREE = Evaluation(
    (
        attempts(4, 4, {"answered": 4}, turns=1.0),
        attempts(1, 4, {"answered": 3, "max_turns": 1}),
        attempts(0, 3, {"truncated": 3}, turns=6.0),
    ),
    samples=4,
    engine_failures=1,
    has_tools=True,
)


def test_evaluation_counts_tasks_alike_and_says_which_interval_each_figure_has() -> None:
    # (1 + 1/4 + 0) / 3; pass@2: (1 + (1 - 3/6) + 0) / 3; pass@4 of the two tasks with 4 samples: (1 + 1) / 2
    found = report(PLAYED, THREE, seed=0)
    assert {k: one.value for k, one in found.pass_at_k.items()} == pytest.approx({1: 1.25 / 3, 2: 0.5, 4: 1.0})
    assert found.mean_turns.value == pytest.approx(3.0)
    stops = {reason: share.value for reason, share in found.stop_reasons.items()}
    assert stops == pytest.approx({"answered": 1.75 / 3, "truncated": 1 / 3, "max_turns": 0.25 / 3})
    assert THREE.metrics()["eval/pass_at_4"] == 1.0
    assert THREE.metrics()["eval/success"] == pytest.approx(1.25 / 3)
    told, *lines = evaluation_table(found).splitlines()
    assert told == "evaluated: runs/a-001: policy 12 (runs/a-001/checkpoints/000012/model), environment trail 2"
    assert not any("succeeded" in line for line in lines)  # failures are explained only where none succeeded
    assert lines[0] == "held-out success: 41.7 % (3 tasks, 4 samples each, 1 more lost to the engine)"
    kinds = {line[:18].strip(): line.rsplit("  ", 1)[1] for line in lines[2:]}
    rows = ("pass@1", "pass@2", "pass@4", "pass^2", "pass^4", "mean turns", "mean reward")
    assert list(kinds) == [*rows, "ended: answered", "ended: truncated", "ended: max_turns"]
    assert kinds.pop("pass@4") == "Wilson"  # both tasks agree
    assert {k: one.value for k, one in found.pass_hat_k.items()} == pytest.approx({1: 1.25 / 3, 2: 1 / 3, 4: 0.5})
    assert set(kinds.values()) == {"bootstrap over tasks"}


# What is said where no episode is a success


def failed(stop_reason: str, calls: int, problem: str | None = None) -> Outcome:
    return Outcome(False, 0.0, 2, stop_reason, calls, problem)


_WRONG, _SILENT, _CUT, _CUT_SILENT = (failed(reason, calls) for reason in ("answered", "truncated") for calls in (2, 0))
_CRASH = [failed("agent_failed", 1, f"exit code 3: {why}") for why in ("no module", "no module", "no key")]
_OPEN = "did not come to an answer"
_SFT = "Show it how first: agentloop sft on demonstrations"
_ROOM = "Raise rollout.max_tokens_per_turn, rollout.max_turns or context.max_tokens"


def test_calls_of_a_policy_that_can_not_call_do_not_count() -> None:
    episode = Episode.answered(Task("What?"), [Message("user", "What?")], 0.0)
    made = replace(episode, num_tool_calls=3, error_kinds=("malformed", "unknown_tool", "raised"))
    assert outcome_of(made, RunConfig()).num_tool_calls == 1  # a tool that raised was called rightly


@pytest.mark.parametrize(
    ("outcomes", "has_tools", "said"),
    [
        ([_WRONG, _SILENT, _SILENT, _CUT], True, f"3 answered wrong, 1 {_OPEN}, 2 called a tool. {_SFT}"),
        # More tokens don't help what calls no tool.
        ([_SILENT, *[_CUT_SILENT] * 3], True, f"1 answered wrong, 3 {_OPEN}, 0 called a tool. {_SFT}"),
        ([_SILENT, *[_CUT] * 3], True, f"1 answered wrong, 3 {_OPEN}, 3 called a tool. {_ROOM}"),
        ([_SILENT, *[_CUT_SILENT] * 3], False, f"1 answered wrong, 3 {_OPEN}. {_ROOM}"),
        ([_WRONG, *_CRASH], False, f"1 answered wrong, 3 {_OPEN}. 2 of them: exit code 3: no module"),
    ],
)
def test_where_none_succeeded_why_is_said_with_what_helps(outcomes: list[Outcome], has_tools: bool, said: str) -> None:
    evaluation = Evaluation((Attempts(tuple(outcomes)),), 4, 0, has_tools)
    plain, trained = (
        evaluation_table(report(replace(PLAYED, policy_version=version), evaluation, seed=0)).splitlines()[2]
        for version in (None, 12)
    )
    assert plain.startswith(f"none of 4 episodes succeeded: {said}")
    assert trained.startswith(f"{plain}. Where it succeeded before training, begin again with a tenth of optimizer.")
