"""docs/questions.md: each block answers on a run that was trained, and each address shows the part that it names."""

import ast
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

from replay.open_buffer import open_buffer
from replay.pages.app import create_app
from replay.questions import run_names
from tests.browser.demonstration import NAME, OTHER, record
from tests.docs.blocks import ROOT, Block, blocks
from tests.replay.pages.serving import Served, served

PAGE = ROOT / "docs" / "questions.md"
OPENING, *BLOCKS = [block for block in blocks() if block.place.startswith("docs/questions.md")]
ANSWERS = re.findall(r"^`(/[^`]*)`,\s+\*\*([^*]+)\*\*", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where somebody stands who has trained a run, and a second one."""
    folder = tmp_path_factory.mktemp("questions")
    run = record(folder)
    for name in ("quickstart-001", "quickstart-002"):
        (folder / "runs" / name).symlink_to(run)
    return folder


@pytest.fixture(scope="module")
def inspector(folder: Path) -> Iterator[tuple[Served, str]]:
    with open_buffer(str(folder / "runs" / f"{NAME}-001")) as source, served(create_app(source)) as server:
        (run,) = run_names(source.store).keys() - {OTHER}
        yield server, run


def test_every_question_has_an_address_with_a_part_and_a_block_of_at_most_three_lines() -> None:
    questions = re.findall(r"^## (\d+)\. .*\?$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert questions == [str(number) for number in range(1, 15)]
    assert len(ANSWERS) == len(BLOCKS) == 14
    assert [block.place for block in BLOCKS if len(block.commands()) > 3] == []


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_block_answers(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    exec(OPENING.text, names)  # noqa: S102  the page as people type it
    *before, last = ast.parse(block.text).body
    assert isinstance(last, ast.Expr)
    exec(compile(ast.Module(before, []), block.place, "exec"), names)  # noqa: S102
    answer = eval(compile(ast.Expression(last.value), block.place, "eval"), names)  # noqa: S307
    for part in answer if isinstance(answer, tuple) else [answer]:
        assert len(part) > 0


@pytest.mark.parametrize(("address", "part"), ANSWERS)
def test_page_shows_the_part_that_answers(address: str, part: str, inspector: tuple[Served, str]) -> None:
    server, run = inspector
    html = unescape(server.page(address.replace("RUN", run).replace("OTHER", OTHER)))
    assert re.search(rf"<(?:h2|h3|th)[^>]*>(?:<a [^>]*>)?{re.escape(part)}", html), part
