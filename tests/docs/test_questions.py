"""docs/questions.md: each block answers on a run that was trained, and each address shows the part that it names."""

import ast
import re
from collections.abc import Iterator
from contextlib import closing
from html import unescape
from pathlib import Path

import pytest

from examples import minimal_loop
from replay.open_buffer import open_buffer
from replay.pages.app import create_app
from replay.questions import run_names
from replay.store import ReplayStore
from tests.browser.demonstration import OTHER, record
from tests.docs.blocks import ROOT, blocks
from tests.replay.pages.serving import Served, served

PAGE = ROOT / "docs" / "questions.md"
OPENING, *BLOCKS = [block for block in blocks() if block.place.startswith("docs/questions.md")]
OWN = "examples/minimal_loop.py"
DRIFT, TWO_RUNS = 4, 8
NOTHING_TO_SAY = {1, 2, 10, 12}
"""Questions of which an answer, or a part of it, is empty there: one task, no tool error, no evaluation."""
ANSWERS = re.findall(r"^`(/[^`]*)`,\s+\*\*([^*]+)\*\*", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module", params=["a trained run", OWN])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where somebody stands who has trained a run, and a second one."""
    folder = tmp_path_factory.mktemp("questions")
    run = record(folder) if request.param != OWN else _train_by_own_loop(folder / "own")
    (folder / "runs").mkdir(exist_ok=True)
    for name in ("quickstart-001", "quickstart-002"):
        (folder / "runs" / name).symlink_to(run)
    return folder


def is_own(folder: Path) -> bool:
    return (folder / "own").exists()


def _train_by_own_loop(folder: Path) -> Path:
    folder.mkdir()
    with closing(ReplayStore.create(folder / "replay.sqlite")) as store:
        minimal_loop.run(store, iterations=6)
    return folder


@pytest.fixture(scope="module")
def inspector(folder: Path) -> Iterator[tuple[Served, str]]:
    with open_buffer(str(folder / "runs" / "quickstart-001")) as source, served(create_app(source)) as server:
        (run,) = run_names(source.store).keys() - {OTHER}
        yield server, run


def test_every_question_has_an_address_with_a_part_and_a_block_of_at_most_three_lines() -> None:
    questions = re.findall(r"^## (\d+)\. .*\?$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert questions == [str(number) for number in range(1, 1 + len(questions))]
    assert len(ANSWERS) == len(BLOCKS) == len(questions)
    assert [block.place for block in BLOCKS if len(block.commands()) > 3] == []


@pytest.mark.parametrize("number", range(1, 1 + len(BLOCKS)))
def test_block_answers(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = BLOCKS[number - 1]
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    exec(OPENING.text, names)  # noqa: S102  the page as people type it
    *before, last = ast.parse(block.text).body
    assert isinstance(last, ast.Expr)
    exec(compile(ast.Module(before, []), block.place, "exec"), names)  # noqa: S102
    answer = eval(compile(ast.Expression(last.value), block.place, "eval"), names)  # noqa: S307
    for part in answer if isinstance(answer, tuple) else [answer]:
        assert len(part) > 0 or (is_own(folder) and number in NOTHING_TO_SAY)


@pytest.mark.parametrize("number", range(1, 1 + len(ANSWERS)))
def test_page_shows_the_part_that_answers(number: int, folder: Path, inspector: tuple[Served, str]) -> None:
    (address, part), (server, run) = ANSWERS[number - 1], inspector
    if is_own(folder) and number in (DRIFT, TWO_RUNS):
        pytest.skip("its database has one run, and no drift of a row")
    html = unescape(server.page(address.replace("RUN", run).replace("OTHER", OTHER)))
    assert re.search(rf"<(?:h2|h3|th)[^>]*>(?:<a [^>]*>)?{re.escape(part)}", html), part
