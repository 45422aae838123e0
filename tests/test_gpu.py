"""What `make gpu` does where there is no GPU."""

import subprocess
import sys

import pytest
import torch

from tests.gpu import ROOT


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_make_gpu_says_in_one_line_that_there_is_none() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == "make gpu must run on a machine with a CUDA device, got none. `make test` needs none.\n"
