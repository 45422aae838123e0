"""The example notebook runs from its first cell to its last, with a model and batches that take seconds."""

import ast
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

from tests.docs.blocks import ROOT
from tests.fakes.runs import rows, save_qwen2

NOTEBOOK = ROOT / "examples" / "ten_lines.ipynb"
SMALL = {
    '"iterations": 30': '"iterations": 2',
    "range(3000)": "range(60)",
    '"trajectories": 128, "mini_batch": 64': '"trajectories": 16, "mini_batch": 16',
    '"tasks": 256': '"tasks": 4',
    '"max_tokens_per_turn": 40': '"max_tokens_per_turn": 8, "max_turns": 2',
}
"""Seconds instead of minutes; nothing else of the notebook is changed."""


STATE = "(logging.root.level, list(logging.root.handlers), logging.root.manager.disable)"
"""What a notebook's own cells may have set."""


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> tuple[nbformat.NotebookNode, Path]:
    """The notebook with its outputs, and the folder it stands in, as in a checkout."""
    checkout = tmp_path_factory.mktemp("checkout")
    save_qwen2(checkout / "runs" / "quickstart-001" / "start")
    (checkout / "examples").mkdir()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        for setting, small in SMALL.items():
            cell.source = cell.source.replace(setting, small)
    notebook.cells[:0] = [new_code_cell(f"import logging\nbefore = {STATE}")]
    notebook.cells.append(new_code_cell(f"before == {STATE}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("IPYTHONDIR", str(checkout / "ipython"))
        client = NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(checkout / "examples")}})
        return client.execute(), checkout


def test_notebook_is_made_small_as_this_file_says() -> None:
    text = "\n".join(cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells)
    assert [setting for setting in SMALL if text.count(setting) != 1] == []


def test_notebook_runs_to_its_end_and_prints_progress_alone(executed: tuple[nbformat.NotebookNode, Path]) -> None:
    notebook, checkout = executed
    run = checkout / "runs" / "ten-lines-001"
    assert rows(run / "replay.sqlite", "select count(*) from iterations") == [(2,)]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "parameters in ../runs/ten-lines-001/model" in code[-2].outputs[-1]["data"]["text/plain"]
    (cell,) = [cell for cell in code if cell.source.startswith("run = agentloop.train(")]
    assert {(output.output_type, output.get("name")) for output in cell.outputs} == {("stream", "stdout")}
    text = "".join(output.text for output in cell.outputs)
    assert re.search(r"[\r\n]iteration 2/2  success ", text) and "\x1b" not in text
    assert re.search(r"\revaluate \d/\d \|", text)  # a bar, which the next line takes the place of
    (shown,) = [cell.outputs[0]["data"] for cell in code if cell.source == "run"]
    assert "<svg" in shown["text/html"] and shown["text/plain"].startswith("../runs/ten-lines-001: iterations 2, held")
    # Importing prints nothing, and logging stays as it was.
    assert [output.output_type for output in code[1].outputs] == ["execute_result"]
    assert code[-1].outputs[0]["data"]["text/plain"] == "True"


def test_stored_outputs_are_of_a_run_that_learned() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (cell,) = [cell for cell in notebook.cells if cell.source == "run.evaluations()"]
    measured = ast.literal_eval(cell.outputs[0]["data"]["text/plain"])
    assert measured[0] < 0.3 < 0.9 <= measured[30]
