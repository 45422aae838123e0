"""Experience from elsewhere in a run: another buffer's rows, and conversations without log-probs."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentloop.algorithms.advantages import group_advantages
from agentloop.config import RunConfig
from agentloop.errors import UserError
from agentloop.training.train import train
from replay import ReplayStore
from replay.exchange import ExchangeError, export_file, import_file
from replay.exchange.teacher import import_chat, teaching_of
from replay.questions.filters import condition
from tests.fakes.runs import SilentDisplay, rows, save_llama, small_config

pytestmark = pytest.mark.slow

DRAWN = (
    "select count(*) from draws d join trajectories t on t.id = d.trajectory "
    "where d.stream = 'replay' and d.state = 'committed' and t.source = '{}'"
)


def short(folder: Path, model: Path, **sections: dict[str, Any]) -> RunConfig:
    run = {"iterations": 1, **sections.pop("run", {})}
    return small_config(folder, model, evaluation={"every": 0, "tasks": 4}, run=run, **sections)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> Path:
    """A run of one iteration, 16 trajectories."""
    old = {"replay": {"anchor": "old"}}
    return train(short(tmp_path_factory.mktemp("first"), qwen2, loss=old), display=SilentDisplay()).folder


def test_rows_of_an_attached_buffer_are_drawn_and_their_lineage_holds(first: Path, tmp_path: Path, qwen2: Path) -> None:
    replay = {"fraction": 0.25, "sampler": "uniform", "successful_only": False, "attach": {"earlier": str(first)}}
    display = SilentDisplay()
    before = (first / "replay.sqlite").read_bytes()
    result = train(short(tmp_path, qwen2, replay=replay), display=display)
    database = result.folder / "replay.sqlite"
    # The first iteration has no rows of its own yet: its 4 replayed ones are the other run's.
    assert rows(database, DRAWN.format("earlier")) == [(4,)]
    assert f"attached {first} as earlier: 16 rows, 16 of them copied now" in display.notes
    assert rows(database, "select source, count(*) from trajectories group by 1") == [("earlier", 16), ("self", 12)]
    assert rows(database, "select distinct staleness from draws where stream = 'replay'") == [(None,)]
    assert rows(database, "pragma foreign_key_check") == []
    assert (first / "replay.sqlite").read_bytes() == before


def test_a_source_that_can_give_nothing_is_named_before_the_first_iteration(
    first: Path, tmp_path: Path, qwen2: Path
) -> None:
    replay = {"fraction": 0.25, "attach": {"earlier": str(first)}, "sources": {"self": 0.5, "erlier": 0.5}}
    display = SilentDisplay()
    train(short(tmp_path, qwen2, replay=replay), display=display)
    assert [note for note in display.notes if "can give nothing" in note] == [
        "source 'erlier' can give nothing: no row has it, but rows have 'earlier'.",
        "source 'earlier' can give nothing: replay.sources leaves out the last of its 16 rows.",
    ]


def test_a_buffer_of_another_tokenizer_is_refused(first: Path, tmp_path: Path) -> None:
    llama = save_llama(tmp_path / "llama")
    with pytest.raises(ExchangeError, match="replay.attach.x must hold rows that this run can learn from, got none"):
        train(short(tmp_path / "runs", llama, replay={"attach": {"x": str(first)}}), display=SilentDisplay())


CHAT = [
    {"messages": [{"role": "user", "content": "Is 3 odd?"}, {"role": "assistant", "content": text}], "reward": reward}
    for text, reward in (("odd", 1.0), ("even", 0.0))
]


@pytest.fixture(scope="module")
def taught(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A buffer of two conversations made for that run."""
    folder = tmp_path_factory.mktemp("taught")
    shutil.copy(first / "replay.sqlite", folder)
    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in CHAT))
    with closing(ReplayStore.open(folder / "replay.sqlite")) as store:
        teaching = teaching_of(store, None, first / "model", group_advantages)
        assert import_chat(store, path, teaching).inserted == 2
        export_file(store, folder / "taught.jsonl", where=condition("source == 'teacher'"))
    with closing(ReplayStore.create(folder / "taught.sqlite")) as store:
        import_file(store, folder / "taught.jsonl", name=None)
    return folder / "taught.sqlite"


def test_conversations_are_trained_on_with_anchor_old(taught: Path, tmp_path: Path, qwen2: Path) -> None:
    attach = {"teacher": str(taught)}
    replay = {"fraction": 0.125, "sampler": "uniform", "successful_only": False, "attach": attach}
    config = short(tmp_path, qwen2, loss={"replay": {"anchor": "old"}}, replay=replay)
    database = train(config, display=SilentDisplay()).folder / "replay.sqlite"
    assert rows(database, DRAWN.format("teacher")) == [(2,)]
    assert rows(database, "select count(*) from iterations where optimizer_steps > 0") == [(1,)]


def test_rows_without_log_probs_end_a_run_of_anchor_behavior_in_one_line(
    taught: Path, tmp_path: Path, qwen2: Path
) -> None:
    replay = {"fraction": 0.125, "successful_only": False, "attach": {"x": str(taught)}}
    with pytest.raises(UserError, match=r"^behavior_log_probs of .* loss.replay.anchor is behavior") as refused:
        train(short(tmp_path, qwen2, replay=replay), display=SilentDisplay())
    assert "\n" not in str(refused.value)
