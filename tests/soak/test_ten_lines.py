"""The notebook, as it is: the quickstart's task, written as functions, is learned as well as its class is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.docs.test_notebook import NOTEBOOK, sources
from tests.soak.test_quickstart import evaluations, warmed_up_model

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warmed_up_model(tmp_path_factory.mktemp("warm"))


@pytest.mark.parametrize("seed", range(2))
def test_ten_lines_reach_ninety_percent_of_held_out_tasks(seed: int, tmp_path: Path, model: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    script = sources(notebook).replace("../runs/quickstart-001/start", str(model))
    script = script.replace('"folder": "../runs"', f'"folder": {str(tmp_path)!r}, "seed": {seed}')
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    success = evaluations(tmp_path / "ten-lines-001")
    print(f"seed {seed}: {success[0]:.1%} -> {success[-2]:.1%}, {success[-1]:.1%}")
    assert success[0] <= 0.35
    assert success[-1] >= 0.90
