import io
import re
import threading

import pytest

from agentloop.engines.generator import SampledTokens
from agentloop.runs.display import ConsoleDisplay, showing_progress
from agentloop.runs.progress_bars import BarDisplay, open_display

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


Shown = tuple[ConsoleDisplay, io.StringIO, Clock]


@pytest.fixture
def shown() -> Shown:
    written, clock = io.StringIO(), Clock()
    return ConsoleDisplay(file=written, clock=clock), written, clock


def test_display_speaks_of_a_long_phase_every_fifteen_seconds(shown: Shown) -> None:
    display, written, clock = shown
    for update in range(1, 61):
        clock.now = update * 1.0
        display.phase("warm-up", update, 600)
    # begun at second 1; spoken of at 16, 31 and 46: an update takes a second, so 584, 569 and 554 seconds are left
    assert written.getvalue().splitlines() == [
        "warm-up ...",
        "warm-up 16/600  60.0 per minute  left <= 9:44",
        "warm-up 31/600  60.0 per minute  left <= 9:29",
        "warm-up 46/600  60.0 per minute  left <= 9:14",
    ]


def test_phase_shows_its_tokens_until_the_first_episode_has_ended(shown: Shown) -> None:
    display, written, clock = shown
    sampled = SampledTokens()
    display.phase("evaluate", 0, 50, lambda: sampled.count)
    clock.now, sampled.count = 30.0, 1515
    display.look()
    clock.now = 60.0
    display.phase("evaluate", 5, 50, lambda: sampled.count)
    assert written.getvalue().splitlines() == [
        "evaluate ...",
        "evaluate 0/50  1,515 tokens, 50.5 per second  for 0:30",
        "evaluate 5/50  5.0 per minute  left <= 9:00",
    ]


def test_a_resumed_phase_goes_by_the_updates_since_then(shown: Shown) -> None:
    display, written, clock = shown
    for update in range(257, 266):
        clock.now += 2.0
        display.phase("sft", update, 744)
    # 479 updates of two seconds are left
    assert written.getvalue().splitlines()[1] == "sft 265/744  30.0 per minute  left <= 15:58"


def test_display_gives_an_iteration_one_line(shown: Shown) -> None:
    display, written, clock = shown
    display.phase("evaluate", 0, 10)
    clock.now = 100.0
    display.phase("evaluate", 10, 10)
    for number in (1, 2):
        clock.now += 5.0
        display.phase("collect", 1, 2)
        display.phase("update", 0, 1)
        display.iteration(number, 12, {**FIGURES, "actor/replay/ess": 0.875}, left=60.0 - 5 * number)
    display.iteration(12, 12, FIGURES, left=0.0)
    assert written.getvalue().splitlines() == [
        "evaluate ...",
        "iteration 1/12  success 17.2 %  fresh 96 + replay 32  replay ESS 0.88  12,346 tokens/s  left <= 0:55",
        "iteration 2/12  success 17.2 %  fresh 96 + replay 32  replay ESS 0.88  12,346 tokens/s  left <= 0:50",
        "iteration 12/12  success 17.2 %  fresh 96 + replay 32  12,346 tokens/s  to be saved",
    ]


def test_long_phase_is_a_bar_below_the_lines_that_ends_with_the_phase() -> None:
    written = io.StringIO()
    display = BarDisplay(written)
    display.phase("loading the model", 0, 1)
    display.phase("evaluate", 0, 40, lambda: 123)
    display.look()
    display.phase("evaluate", 20, 40)
    display.look()
    display.note("by the way")
    display.phase("evaluate", 40, 40)
    display.look()
    display.iteration(12, 12, FIGURES, left=0.0)
    *lines, last = written.getvalue().split("\n")
    assert [re.split(r"\r *\r", line)[-1] for line in lines] == [
        "loading the model ...",
        "by the way",
        "iteration 12/12  success 17.2 %  fresh 96 + replay 32  12,346 tokens/s  to be saved",
    ]
    assert ", 123 tokens, " in lines[1] and "\revaluate 20/40 |" in lines[1] and last == ""


def test_output_that_is_no_terminal_has_lines_alone() -> None:
    assert type(open_display()) is ConsoleDisplay


@pytest.mark.parametrize(
    ("number", "figures", "part"),
    [
        (1, {"batch/fresh": 118.0, "batch/replay": 10.0}, "fresh 118 + replay 10 of 32  "),
        (1, {"rollout/failed_calls": 0.125}, "  failed tool calls 12.5 %  "),
        (1, {"rollout/engine_failures": 3.0, "rollout/not_judged": 2.0}, "  3 lost to the engine  2 not judged  "),
        # z^2 = 3.8415: (0.2 + 3.8415 / 80 -+ 1.96 sqrt(0.004 + 3.8415 / 6400)) / (1 + 3.8415 / 40)
        (1, {"eval/success": 0.2, "eval/tasks": 40.0}, "  held-out 20.0 % (10-35)  "),
        (41, {}, "left <= 1:02:05\n"),
    ],
)
def test_iteration_says_what_went_otherwise(shown: Shown, number: int, figures: dict[str, float], part: str) -> None:
    display, written, _ = shown
    display.iteration(number, 60, {**FIGURES, **figures}, left=3725.9)
    assert part in written.getvalue()


def test_display_speaks_while_nothing_of_a_phase_ends() -> None:
    class Heard(io.StringIO):
        twice = threading.Event()

        def write(self, text: str) -> int:
            written = super().write(text)
            if self.getvalue().count("evaluate 0/64  for ") == 2:
                self.twice.set()
            return written

    written = Heard()
    display = ConsoleDisplay(file=written)
    display.silence = 0.01
    with showing_progress(display):
        display.phase("evaluate", 0, 64)
        assert written.twice.wait(60)
        display.phase("evaluate", 64, 64)
    assert "for 0:00" in written.getvalue().splitlines()[1]
    assert not any(thread.name == "display" for thread in threading.enumerate())
