"""A model with LoRA adapters: what is trained, what the reference is, and that a run goes on from its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentloop.config import ModelSection
from agentloop.errors import UserError
from agentloop.learning.batch import build_batch
from agentloop.learning.scoring import score
from agentloop.models import load
from agentloop.models.actor import Actor
from agentloop.models.critic import Critic
from agentloop.models.load import has_adapters, load_model
from agentloop.models.reference import WithoutAdapters
from agentloop.training import train
from tests.agentloop.runs import SilentDisplay, StopAfter, save_qwen2, small_config
from tests.agentloop.test_loop import same_bits
from tests.agentloop.training_examples import AUTHORS, mixed_rows, tiny_actor


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A whole model, and adapters on it that already say something of their own."""
    base = save_qwen2(tmp_path_factory.mktemp("models") / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(0)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    folder = base.with_name("adapters")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return base, folder


def adapters(folder: Path) -> dict[str, torch.Tensor]:
    """Of a run's newest policy."""
    return load_file(max((folder / "policies").iterdir()) / "adapter_model.safetensors")


def test_only_adapters_are_trained_and_the_reference_is_the_model_below_them(lora: tuple[Path, Path]) -> None:
    base, folder = lora
    model = load_model(ModelSection(), folder).model
    assert has_adapters(model)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    actor = Actor(model)
    batch = build_batch(mixed_rows(), AUTHORS)
    with_adapters, _ = score(actor, batch, max_tokens=64)
    reference, _ = score(WithoutAdapters(actor), batch, max_tokens=64)
    below, _ = score(Actor(load_model(ModelSection(), base).model), batch, max_tokens=64)
    assert torch.equal(reference, below)
    assert float((with_adapters - reference).abs().max()) > 0.01
    # Afterwards everything is as it was.
    assert torch.equal(score(actor, batch, max_tokens=64)[0], with_adapters)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trained


def test_reference_without_adapters_needs_some() -> None:
    with pytest.raises(UserError, match="kl.reference must not be adapter_off for a model without adapters"):
        WithoutAdapters(tiny_actor())


def test_critic_of_a_model_with_adapters_trains_adapters_of_its_own_and_the_head(lora: tuple[Path, Path]) -> None:
    critic = Critic(Actor(load_model(ModelSection(), lora[1]).model), shared=False)
    trained = [name for name, parameter in critic.weights.named_parameters() if parameter.requires_grad]
    assert {"head.weight", "head.bias"} < set(trained)
    assert all("lora_" in name or name.startswith("head.") for name in trained)


def test_run_on_adapters_resumes_like_the_unbroken_one(lora: tuple[Path, Path], tmp_path: Path) -> None:
    sections: dict[str, Any] = {"kl": {"loss_coef": 0.1}}
    display = SilentDisplay()
    whole = train(small_config(tmp_path / "a", lora[1], **sections), display=display)
    # The reference is the model below: the KL is there from the start.
    assert display.iterations[0]["actor/kl_loss"] > 0.0

    again = small_config(tmp_path / "b", lora[1], **sections)
    assert train(again, display=StopAfter(1)).iterations == 1
    resumed = train(again, resume=True, display=SilentDisplay())
    assert same_bits(adapters(resumed.folder), adapters(whole.folder))


def test_adapters_where_peft_is_missing_are_refused_in_one_line(
    lora: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"got the adapters in .*pip install 'agentloop\[peft\]'"):
        load_model(ModelSection(), lora[1])
