"""A model with its weights rounded as an engine holds them, and with its own again afterwards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentloop.models.backbone_passes import cast_weights
from tests.fakes.runs import save_llama, save_qwen2

IDS = torch.tensor([[3, 9, 4, 17, 5, 22]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.fixture(params=[save_llama, save_qwen2])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    request.param(tmp_path / "model")
    return tmp_path / "model"


FULL, HALF = torch.float32, torch.bfloat16


@pytest.mark.parametrize(("own", "products", "gap"), [(FULL, FULL, 1e-6), (FULL, HALF, 0.01), (HALF, FULL, 1e-6)])
def test_logits_are_those_of_rounded_weights(folder: Path, own: torch.dtype, products: torch.dtype, gap: float) -> None:
    model, copy = loaded(folder, own), loaded(folder, torch.bfloat16).to(products)
    with cast_weights(model, torch.bfloat16, products=products):
        found = logits(model)
    # Where weights lie in memory changes the last bit of a product.
    torch.testing.assert_close(found, logits(copy), rtol=0, atol=gap)
    assert not torch.equal(found.float(), logits(model))


def test_weights_are_its_own_again_also_after_a_pass_that_failed(folder: Path) -> None:
    model = loaded(folder)
    own = dict(model.named_parameters())
    before = {name: weight.clone() for name, weight in own.items()}
    with pytest.raises(IndexError), cast_weights(model, torch.bfloat16, products=torch.bfloat16):
        model(torch.tensor([[10**6]]))
    with cast_weights(model, torch.float16, products=torch.float32):
        logits(model)
    assert {name: id(weight) for name, weight in model.named_parameters()} == {n: id(w) for n, w in own.items()}
    assert all(torch.equal(weight, before[name]) and weight.requires_grad for name, weight in own.items())
    assert not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_rounded_as_well(folder: Path, dtype: torch.dtype) -> None:
    from peft import LoraConfig

    model = loaded(folder, dtype)
    plain = logits(model)
    model.add_adapter(LoraConfig(r=2, lora_alpha=8, target_modules="all-linear", init_lora_weights=False))
    exact = logits(model.eval())
    for products in (torch.float32, torch.bfloat16):
        with cast_weights(model, torch.bfloat16, products=products):
            found = logits(model)
        assert found.dtype == products
        assert (found - exact).abs().max() < 0.2 * (plain - exact).abs().max()
