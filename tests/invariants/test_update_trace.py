"""Through how many files a draw and an update go."""

import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

from agentloop.learning.trainer import Trainer
from replay import make_sampler
from replay.sampling.draw import RunDraws
from tests.fakes.batch_rows import ragged
from tests.fakes.records import Fresh, iterated, request
from tests.fakes.tiny_actors import LOSS, run_config, sampled_by, tiny_actor, trainer

ROOT = Path(__file__).parents[2]
LEARNING = tuple(ROOT / "agentloop" / name for name in ("learning", "algorithms", "config"))


def in_learning(frame: FrameType) -> bool:
    return any(Path(frame.f_code.co_filename).is_relative_to(folder) for folder in LEARNING)


def in_replay(frame: FrameType) -> bool:
    return Path(frame.f_code.co_filename).is_relative_to(ROOT / "replay")


def in_replay_up_to_storage(frame: FrameType) -> bool:
    """In `replay`, but not what storage does behind its door: calls of its own."""
    caller = frame.f_back
    while caller is not None and not in_replay(caller):
        caller = caller.f_back
    files = [Path(each.f_code.co_filename) for each in (frame, caller) if each is not None]
    return in_replay(frame) and [file.is_relative_to(ROOT / "replay" / "storage") for file in files] != [True, True]


def visits_of(first: Callable[..., object], call: Callable[[], object], seen: Callable[[FrameType], bool]) -> list[str]:
    """The files that `first` goes through when `call` comes to it first, one after another."""
    begun, files = list[FrameType](), list[str]()

    def follow(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is first.__code__ and not begun:
            begun.append(frame)
        if event == "call" and begun and seen(frame):
            files.append(str(Path(frame.f_code.co_filename).relative_to(ROOT)))
        if event == "return" and begun == [frame]:
            sys.setprofile(None)

    sys.setprofile(follow)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [file for file, _ in groupby(files)]


def test_an_update_goes_through_few_files() -> None:
    actor, config = tiny_actor(), run_config(loss=LOSS, batch={"mini_batch": 64, "micro_batch_tokens": 4096})
    learner, rows = trainer(actor, config), sampled_by(actor, ragged())
    visits = visits_of(Trainer.update, lambda: learner.update(rows, iteration=1), in_learning)
    assert len(set(visits)) <= 9, visits
    assert len(visits) - len(set(visits)) <= 24


def test_a_draw_goes_through_few_files(tmp_path: Path) -> None:
    store, sampler = iterated(tmp_path / "replay.sqlite"), make_sampler("success", 0)
    store.reserve_fresh(Fresh(4).append_to(store).draws())
    visits = visits_of(RunDraws.draw, lambda: store.draw(request(4, 2), sampler), in_replay_up_to_storage)
    assert len(set(visits)) <= 10, visits
    assert len(visits) - len(set(visits)) <= 12
