"""Triton's kernels against the plain path, in its interpreter on the CPU: what they compute, not how fast."""

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from agentloop.models.token_log_probs.chunked import How, head_log_probs
from tests.agentloop.models.test_chunked import TOLERANCES, assert_close, case, derivatives, plain

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install 'agentloop-replay[gpu]'"
)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="it is this run")
def test_kernels_pass_in_the_interpreter() -> None:
    # In a process of its own: the interpreter is chosen when triton is imported.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run with TRITON_INTERPRET=1" not in done.stdout, done.stdout


@pytest.mark.skipif(not INTERPRETED, reason="run with TRITON_INTERPRET=1 by the test above")
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("size", [(64, 64), (5, 7)])
@pytest.mark.parametrize(("dtype", "within"), TOLERANCES)
def test_kernels_are_as_plain_paths(dtype: torch.dtype, within: float, size: tuple[int, int], entropy: bool) -> None:
    compare(case(dtype), within, size, entropy=entropy)
    compare(case(dtype, scale=1e4), within, size, entropy=entropy)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_compiled_kernels_equal_the_plain_path(dtype: torch.dtype, tolerance: float, entropy: bool) -> None:
    moved = {
        name: value.detach().to("cuda").requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in case(dtype).items()
    }
    compare(moved, tolerance, (64, 64), entropy=entropy)


def compare(inputs: dict[str, Any], tolerance: float, size: tuple[int, int], *, entropy: bool) -> None:
    from agentloop.models.token_log_probs.triton_kernels import TritonRows

    found = head_log_probs(**inputs, entropy=entropy, how=How(*size, TritonRows()))
    wanted = plain(inputs)[: 1 + entropy]
    for one, other in zip([values for values in found if values is not None], wanted, strict=True):
        assert_close(one, other, tolerance)
    # As a model returns them: in one tensor.
    both = [torch.stack([v for v in values if v is not None], dim=-1).unbind(-1) for values in (found, wanted)]
    for one, other in zip(derivatives(inputs, both[0]), derivatives(inputs, both[1]), strict=True):
        assert_close(one, other, tolerance)


@pytest.mark.skipif(not INTERPRETED, reason="run with TRITON_INTERPRET=1 by the test above")
def test_logits_before_the_temperature_are_scaled_and_their_gradient_is_cast_once() -> None:
    from agentloop.models.token_log_probs.chunked import Cotangents, RowSums, TorchRows
    from agentloop.models.token_log_probs.triton_kernels import TritonRows

    made = torch.Generator().manual_seed(0)
    logits = torch.randn((5, 11), generator=made)
    columns = torch.tensor([0, 10, -1, 11, 4])
    factor = torch.rand(5, generator=made) + 0.5
    sums, other = (RowSums.of_nothing(factor, factor=factor) for _ in range(2))
    TorchRows().absorb(logits.clone(), sums, columns, entropy=True, spare=torch.empty_like(logits))
    TritonRows().absorb(logits.clone(), other, columns, entropy=True, spare=torch.empty_like(logits))
    for name in ("top", "total", "moment", "target"):
        torch.testing.assert_close(getattr(other, name), getattr(sums, name))
    cotangents = Cotangents(torch.randn(5, generator=made), torch.randn(5, generator=made))
    found, wanted = (
        rows.differentiate(
            logits.clone(), sums, columns, cotangents=cotangents, operand=torch.bfloat16, spare=torch.empty_like(logits)
        )
        for rows in (TritonRows(), TorchRows())
    )
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-6)
