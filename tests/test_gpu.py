"""What `make gpu` does before and after the GPU's part."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.gpu import BEGIN, END, PAGE, ROOT, with_figures

ENVIRONMENT = {"date": "2026-01-02", "gpu": "a GPU", "hardware": "a machine", "torch": "2"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_make_gpu_says_in_one_line_that_there_is_none() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == "make gpu must run on a machine with a CUDA device, got none. `make test` needs none.\n"


def test_figures_take_the_place_of_earlier_ones_with_their_verdicts() -> None:
    page = PAGE.read_text()
    once = with_figures(page, ENVIRONMENT, {"tokens": 8192.0, "memory": 0.5})
    again = with_figures(once, ENVIRONMENT, {"memory": 0.1})
    assert "Measured on 2026-01-02 by `make gpu` on a GPU (a machine; torch 2)." in again
    assert "| `memory` | 0.5 | goal <= 0.2   miss |" in once and "| `memory` | 0.1 | goal <= 0.2   PASS |" in again
    assert "tokens` | 8.19e+03" in once and "tokens` | 8.19e+03" not in again
    for changed in (once, again):
        assert changed.partition(BEGIN)[0] == page.partition(BEGIN)[0]
        assert changed.partition(END)[2] == page.partition(END)[2]


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="must hold"):
        with_figures("a page", ENVIRONMENT, {})
