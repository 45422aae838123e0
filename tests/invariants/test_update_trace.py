"""Through which files a draw and an update go: `python -m tests.invariants.test_update_trace` prints them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from agentloop.learning.trainer import Trainer
from replay import make_sampler
from replay.sampling.draw import RunDraws
from tests.fakes.batch_rows import LOSS, ragged, run_config, sampled_by, tiny_actor, trainer
from tests.fakes.records import Fresh, iterated, request

ROOT = Path(__file__).parents[2]
STORAGE = ROOT / "replay" / "storage"
"""A door: what storage does behind it is no part of a draw's way."""
LEARNING = tuple(ROOT / "agentloop" / name for name in ("learning", "algorithms", "config"))


@dataclass
class Way:
    """The files of the calls that one call makes, one after another."""

    visits: list[Path] = field(default_factory=list)

    @property
    def files(self) -> set[Path]:
        return set(self.visits)

    @property
    def returns(self) -> int:
        """How often the way comes back to a file that it has left."""
        return len(self.visits) - len(self.files)

    def __str__(self) -> str:
        visits = "\n".join(f"  {file.relative_to(ROOT)}" for file in self.visits)
        return f"{len(self.files)} files, {len(self.visits)} visits, {self.returns} returns\n{visits}"


@contextmanager
def way_of(traced: Callable[..., object], counts: Callable[[FrameType], bool]) -> Iterator[Way]:
    """The way of the first call of `traced`, through the files of frames that count; it is whole at the end."""
    code: CodeType = traced.__code__
    way, calls, outermost = Way(), list[Path](), list[FrameType]()

    def follow(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is code and not outermost:
            outermost.append(frame)
        if event == "call" and outermost and counts(frame):
            calls.append(Path(frame.f_code.co_filename))
        if event == "return" and outermost == [frame]:
            sys.setprofile(None)

    sys.setprofile(follow)
    try:
        yield way
    finally:
        sys.setprofile(None)
    way.visits += [file for file, _ in groupby(calls)]


def is_in_learning(frame: FrameType) -> bool:
    return any(Path(frame.f_code.co_filename).is_relative_to(folder) for folder in LEARNING)


def is_in_replay(frame: FrameType) -> bool:
    return Path(frame.f_code.co_filename).is_relative_to(ROOT / "replay")


def is_in_replay_up_to_storage(frame: FrameType) -> bool:
    """Whether the frame is one of `replay`, and not one that storage called itself."""
    caller = frame.f_back
    while caller is not None and not is_in_replay(caller):
        caller = caller.f_back
    callers = [each for each in (frame, caller) if each is not None]
    within = [Path(each.f_code.co_filename).is_relative_to(STORAGE) for each in callers]
    return is_in_replay(frame) and within != [True, True]


def way_of_an_update() -> Way:
    actor = tiny_actor()
    config = run_config(loss=LOSS, batch={"mini_batch": 64, "micro_batch_tokens": 4096})
    learner, rows = trainer(actor, config), sampled_by(actor, ragged())
    with way_of(Trainer.update, is_in_learning) as way:
        learner.update(rows, iteration=1)
    return way


def way_of_a_draw(folder: Path, counts: Callable[[FrameType], bool] = is_in_replay_up_to_storage) -> Way:
    folder.mkdir(exist_ok=True)
    store = iterated(folder / "replay.sqlite")
    store.reserve_fresh(Fresh(4).append_to(store).draws())
    with way_of(RunDraws.draw, counts) as way:
        store.draw(request(4, 2), make_sampler("success", 0))
    return way


def test_an_update_goes_through_few_files() -> None:
    way = way_of_an_update()
    assert (len(way.files) <= 9, way.returns <= 24) == (True, True), str(way)


def test_a_draw_goes_through_few_files(tmp_path: Path) -> None:
    way = way_of_a_draw(tmp_path)
    assert (len(way.files) <= 10, way.returns <= 12) == (True, True), str(way)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        print("RunDraws.draw:", way_of_a_draw(Path(folder, "door")))
        print("RunDraws.draw, with what storage does:", way_of_a_draw(Path(folder, "whole"), is_in_replay))
    print("Trainer.update:", way_of_an_update())
