"""Which files one update goes through."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fakes.batch_rows import LOSS, ragged, run_config, sampled_by, tiny_actor, trainer

ROOT = Path(__file__).parents[2]
FOLDERS = tuple(ROOT / "agentloop" / name for name in ("learning", "algorithms", "config"))


def files_of_an_update() -> list[str]:
    """The file of each call into FOLDERS while `Trainer.update` learns from one batch, once for calls in a row."""
    actor, entered = tiny_actor(), list[str]()
    config = run_config(loss=LOSS, batch={"mini_batch": 64, "micro_batch_tokens": 4096})
    learner, rows = trainer(actor, config), sampled_by(actor, ragged())

    def called(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and any(file.is_relative_to(folder) for folder in FOLDERS):
            name = str(file.relative_to(ROOT / "agentloop"))
            if entered[-1:] != [name]:
                entered.append(name)

    sys.setprofile(called)
    try:
        learner.update(rows, iteration=1)
    finally:
        sys.setprofile(None)
    return entered


def test_an_update_goes_through_few_files() -> None:
    entered = files_of_an_update()
    assert len(set(entered)) <= 10, entered
    assert len(entered) - len(set(entered)) <= 37
