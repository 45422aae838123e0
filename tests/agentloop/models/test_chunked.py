"""Log-probs from hidden states: the plain path's values and gradients, in chunks."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentloop.algorithms.log_probs import entropies, log_softmax
from agentloop.models.token_log_probs.chunked import (
    ChunkSizes,
    Cotangents,
    RowSums,
    absorb,
    differentiate,
    head_log_probs,
)

TOLERANCES = [(torch.float64, 1e-10), (torch.float32, 1e-5)]
# One chunk; even ones; ragged edges on both sides; a token and a word at a time.
CHUNKS = [(64, 64), (3, 8), (5, 7), (1, 1)]


def case(dtype: torch.dtype, *, tokens: int = 12, scale: float = 1.0) -> dict[str, Any]:
    """A vocabulary of 24, width 6, temperatures from 0.5 to 2."""
    made = torch.Generator().manual_seed(0)
    return {
        "hidden": (scale * torch.randn(tokens, 6, generator=made, dtype=torch.float64)).to(dtype).requires_grad_(),
        "weight": torch.randn(24, 6, generator=made, dtype=torch.float64).to(dtype).requires_grad_(),
        "targets": torch.randint(0, 24, (tokens,), generator=made),
        "temperature": 0.5 + 1.5 * torch.rand(tokens, generator=made),
    }


def plain(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    scores = log_softmax(inputs["hidden"] @ inputs["weight"].t(), inputs["temperature"])
    return scores.gather(1, inputs["targets"][:, None])[:, 0], entropies(scores)


def derivatives(inputs: dict[str, Any], outputs: tuple[Tensor | None, ...]) -> list[Tensor]:
    """Of a sum with different weights, negative ones among them, wrt all that has a gradient."""
    made = torch.Generator().manual_seed(1)
    loss = sum(
        ((out * torch.randn(out.shape, generator=made, dtype=torch.float64).to(out)).sum())
        for out in outputs
        if out is not None
    )
    assert isinstance(loss, Tensor)
    leaves = [value for value in inputs.values() if value.requires_grad]
    return list(torch.autograd.grad(loss, leaves))


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert found.dtype == wanted.dtype
    scale = max(1.0, *wanted.abs().flatten().tolist(), 0.0)
    assert bool(((found - wanted).abs() <= tolerance * scale).all())


def assert_same(inputs: dict[str, Any], tolerance: float, sizes: ChunkSizes | None = None, **options: Any) -> None:
    """Values and gradients are finite, and those of the plain path."""
    found, wanted = head_log_probs(**inputs, **options, sizes=sizes or ChunkSizes(5, 7)), plain(inputs)
    if None not in found:  # as a model returns them: in one tensor
        found = torch.stack(found, dim=-1).unbind(-1)  # type: ignore[arg-type]
    pairs = [(one, other) for one, other in zip(found, wanted, strict=True) if one is not None]
    of_found = derivatives(inputs, tuple(one for one, _ in pairs))
    of_wanted = derivatives(inputs, tuple(other for _, other in pairs))
    assert len(pairs) == 1 + options.get("entropy", True)
    for one, other in [*pairs, *zip(of_found, of_wanted, strict=True)]:
        assert bool(one.isfinite().all())
        assert_close(one, other, tolerance)


@pytest.mark.parametrize("size", CHUNKS)
@pytest.mark.parametrize(("dtype", "within"), TOLERANCES)
def test_chunks_are_as_the_plain_path(dtype: torch.dtype, within: float, size: tuple[int, int]) -> None:
    for tokens in (12, 1, 0):
        assert_same(case(dtype, tokens=tokens), within, ChunkSizes(*size))
    inputs = case(dtype)
    with torch.no_grad():  # logits of ten thousand stay numbers
        inputs["hidden"].zero_()[:, 0] = torch.linspace(-1e4, 1e4, 12, dtype=torch.float64).to(dtype)
        inputs["weight"][:, 0] = torch.linspace(-1, 1, 24, dtype=torch.float64).to(dtype)
        inputs["temperature"].fill_(1.0)
    assert_same(inputs, within, ChunkSizes(*size))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_log_probs_and_entropies_have_their_gradient_alone(dtype: torch.dtype, tolerance: float, which: int) -> None:
    inputs = case(dtype)
    found, wanted = (
        derivatives(inputs, (outputs[which],))
        for outputs in (head_log_probs(**inputs, sizes=ChunkSizes(5, 7)), plain(inputs))
    )
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, tolerance)
    if which == 0:
        assert_same(inputs, tolerance, entropy=False)


def test_two_words_at_temperature_two_by_hand() -> None:
    # Logits (0, 2 log 3) at temperature 2 are (0, log 3): probabilities 1/4 and 3/4.
    hidden = torch.tensor([[2 * math.log(3)]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[0.0], [1.0]], dtype=torch.float64, requires_grad=True)
    log_probs, uncertainty = head_log_probs(
        hidden, weight, targets=torch.tensor([0]), temperature=torch.tensor([2.0]), sizes=ChunkSizes(1, 1)
    )
    assert uncertainty is not None
    assert log_probs.item() == pytest.approx(math.log(1 / 4), abs=1e-12)
    assert uncertainty.item() == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3), abs=1e-12)
    of_hidden, of_weight = torch.autograd.grad(log_probs.sum(), (hidden, weight), retain_graph=True)
    # d log p_0 / d logits = (1 - 1/4, -3/4) / 2; the hidden state meets weights 0 and 1, the weights 2 log 3.
    assert of_hidden.item() == pytest.approx(-3 / 8, abs=1e-12)
    assert of_weight[:, 0].tolist() == pytest.approx([3 / 8 * 2 * math.log(3), -3 / 8 * 2 * math.log(3)], abs=1e-12)
    # d entropy / d logit_1 = -p_1 (log p_1 + entropy) / 2, and log p_1 + entropy = (log 3/4 - log 1/4) / 4 = log 3 / 4.
    (of_hidden,) = torch.autograd.grad(uncertainty.sum(), hidden)
    assert of_hidden.item() == pytest.approx(-0.75 * math.log(3) / 4 / 2, abs=1e-12)


def test_bfloat16_is_summed_in_float32() -> None:
    # 8 bits of mantissa: values of the same operands differ by float32's rounding, gradients by that of their own type.
    inputs = case(torch.bfloat16)
    precise = {
        name: value.detach().float().requires_grad_() if value is not None and value.requires_grad else value
        for name, value in inputs.items()
    }
    found, wanted = head_log_probs(**inputs, sizes=ChunkSizes(5, 7)), plain(precise)
    for one, other in zip(found, wanted, strict=True):
        assert one is not None
        assert_close(one, other, 1e-5)
    for one, other in zip(derivatives(inputs, found), derivatives(precise, wanted), strict=True):
        assert one.dtype == torch.bfloat16
        assert_close(one.float(), other, 2**-8)


def test_autocast_changes_nothing_where_products_have_no_wider_results() -> None:
    inputs = case(torch.float32)
    outside = head_log_probs(**inputs, sizes=ChunkSizes(5, 7))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = head_log_probs(**inputs, sizes=ChunkSizes(5, 7))
        gradients = derivatives(inputs, inside)
    for one, other in zip(inside, outside, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    for one, other in zip(gradients, derivatives(inputs, outside), strict=True):
        assert torch.equal(one, other)


def test_logits_are_scaled_that_states_could_not_be_divided_for() -> None:
    # As of bfloat16 products on a GPU: logits 0, 2 log 3 come before a temperature of 2; 1/4 and 3/4 as above.
    factor, columns = torch.tensor([0.5], dtype=torch.float64), torch.tensor([0])
    sums = RowSums.before_any_chunk(factor, factor=factor)
    logits = torch.tensor([[0.0, 2 * math.log(3)]], dtype=torch.float64)
    absorb(logits.clone(), sums, columns, entropy=True, spare=torch.empty_like(logits))
    assert sums.log_probs().item() == pytest.approx(math.log(1 / 4), abs=1e-12)
    assert sums.entropies().item() == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3), abs=1e-12)
    gradient = differentiate(
        logits,
        sums,
        columns,
        cotangents=Cotangents(torch.ones(1, dtype=torch.float64), None),
        operand=torch.float64,
        spare=torch.empty_like(logits),
    )
    # Less the factor -1 / total, total = 1/3 + 1: (1 - 1/4, -3/4) times -4/3.
    assert gradient[0].tolist() == pytest.approx([-1.0, 1.0], abs=1e-12)


class Sizes(TorchDispatchMode):
    """Calls by name, and the most numbers of one storage that a call returned."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append(func.overloadpacket.__name__)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


def test_no_array_is_as_large_as_the_logits() -> None:
    made = torch.Generator().manual_seed(0)
    hidden = torch.randn(200, 4, generator=made, requires_grad=True)
    weight = torch.randn(300, 4, generator=made, requires_grad=True)
    targets, temperature = torch.randint(0, 300, (200,), generator=made), torch.ones(200)

    def largest(sizes: ChunkSizes) -> int:
        with Sizes() as counted:
            found = head_log_probs(hidden, weight, targets=targets, temperature=temperature, sizes=sizes)
            derivatives({"hidden": hidden, "weight": weight}, found)
        return counted.largest

    # Chunks of 16 x 32 and as much room again, beside [200, 4] and [300, 4]; logits have 60,000 numbers.
    assert largest(ChunkSizes(16, 32)) == max(2 * 16 * 32, 200 * 4, 300 * 4)
    assert largest(ChunkSizes(200, 300)) == 2 * 200 * 300


def test_frozen_head_costs_no_product_for_its_gradient() -> None:
    # 12 tokens in 3 chunks of 5, 24 words in 4 of 7: a product per chunk in forward, and again in backward.
    for frozen, products in ((True, 12), (False, 24)):
        inputs = case(torch.float64)
        inputs["weight"].requires_grad_(not frozen)
        log_probs, _ = head_log_probs(**inputs, sizes=ChunkSizes(5, 7))
        with Sizes() as counted:
            derivatives(inputs, (log_probs,))
        assert counted.calls.count("mm") == 12
        assert counted.calls.count("addmm_") == products
