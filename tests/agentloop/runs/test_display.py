from __future__ import annotations

import io

import pytest
from rich.console import Console

from agentloop.runs.display import LiveDisplay, PlainDisplay, percent, time_left

FIGURES = {
    "rollout/success": 0.172,
    "batch/fresh": 96.0,
    "batch/replay": 32.0,
    "batch/planned_replay": 32.0,
    "speed/tokens_per_second": 12_345.6,
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain() -> tuple[PlainDisplay, io.StringIO, Clock]:
    written, clock = io.StringIO(), Clock()
    return PlainDisplay(Console(file=written, soft_wrap=True, highlight=False), clock), written, clock


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0.0 %"), (0.172, "17.2 %"), (0.9609375, "96.1 %"), (1.0, "100.0 %")]
)
def test_percent_has_one_digit_and_a_space(share: float, text: str) -> None:
    assert percent(share) == text


def test_time_left_is_the_rest_at_the_pace_so_far() -> None:
    # 4 of 20 in 10 s: 16 more at 2.5 s each
    assert time_left(10.0, 4, 20) == "left <= 0:40"
    assert time_left(600.0, 1, 11) == "left <= 100:00"
    assert time_left(10.0, 20, 20) == "left <= 0:00"


def test_plain_display_speaks_of_a_long_phase_every_fifteen_seconds() -> None:
    display, written, clock = plain()
    for update in range(1, 61):
        clock.now = update * 1.0
        display.phase("warm-up", update, 600)
    # begun at second 1; spoken of at 16, 31 and 46: an update takes a second, so 584, 569 and 554 seconds are left
    assert written.getvalue().splitlines() == [
        "warm-up ...",
        "warm-up 16/600  left <= 9:44",
        "warm-up 31/600  left <= 9:29",
        "warm-up 46/600  left <= 9:14",
    ]


def test_a_resumed_phase_goes_by_the_updates_since_then() -> None:
    display, written, clock = plain()
    for update in range(257, 289):
        clock.now += 2.0
        display.phase("sft", update, 744)
    assert written.getvalue().splitlines()[1] == "sft 265/744  left <= 15:58"  # 479 updates of two seconds


def test_plain_display_gives_an_iteration_one_line() -> None:
    display, written, clock = plain()
    display.phase("evaluate", 0, 10)
    clock.now = 100.0
    display.phase("evaluate", 10, 10)
    for number in (1, 2):
        clock.now += 5.0
        display.phase("collect", 1, 2)
        display.phase("update", 0, 1)
        display.iteration(number, 12, {**FIGURES, "actor/replay/ess": 0.875})
    assert written.getvalue().splitlines() == [
        "evaluate ...",
        "iteration 1/12  success 17.2 %  fresh 96 + replay 32  replay ESS 0.88  12,346 tokens/s  left <= 0:55",
        "iteration 2/12  success 17.2 %  fresh 96 + replay 32  replay ESS 0.88  12,346 tokens/s  left <= 0:50",
    ]


def test_replay_that_the_buffer_could_not_give_is_told() -> None:
    display, written, _ = plain()
    display.iteration(1, 2, {**FIGURES, "batch/fresh": 118.0, "batch/replay": 10.0})
    assert "fresh 118 + replay 10 of 32  " in written.getvalue()


def test_time_left_of_a_resumed_run_counts_its_own_iterations_only() -> None:
    display, written, clock = plain()
    clock.now = 3.0
    display.iteration(41, 60, FIGURES)
    assert written.getvalue().endswith("left <= 0:57\n")


def test_live_display_ends_with_the_figures_of_the_last_iteration_and_can_be_closed_twice() -> None:
    written = io.StringIO()
    display = LiveDisplay(Console(file=written, force_terminal=True, width=150, highlight=False))
    display.phase("collect", 64, 128)
    display.note("a word in between")
    display.iteration(2, 2, {**FIGURES, "eval/success": 0.5})
    display.close()
    display.close()
    last = written.getvalue().replace("\r", "\n").splitlines()
    assert any("a word in between" in line for line in last)
    assert "held-out 50.0 %" in written.getvalue().rsplit("iteration 2/2", 1)[1]


@pytest.mark.parametrize(("share", "told"), [(0.0, False), (0.125, True)])
def test_tools_that_fail_are_told_with_the_iteration(share: float, told: bool) -> None:
    display, written, _ = plain()
    display.iteration(1, 2, {**FIGURES, "rollout/failed_calls": share})
    assert ("  failed tool calls 12.5 %  " in written.getvalue()) == told
