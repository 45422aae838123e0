"""A model with LoRA adapters: what is trained, what the reference is, and that a run goes on from its checkpoint."""

import json
import shutil
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentloop.analysis.stored_log_probs import check_log_probs, load_weights
from agentloop.analysis.stored_policies import Asked, evaluate_run, weights_of_run
from agentloop.config import ModelSection, RunConfig
from agentloop.distributed.tensor_files import read_tensors
from agentloop.errors import UserError
from agentloop.learning.batch import build_batch
from agentloop.learning.passes import score
from agentloop.models.actor import Actor
from agentloop.models.adapters import WithoutAdapters, load_policy
from agentloop.models.critic import Critic
from agentloop.models.loading import has_adapters, load_model
from agentloop.runs.run_folder import open_run_folder
from agentloop.supervised.sft import sft
from agentloop.training.train import train
from replay.store import ReplayStore
from tests.fakes.batch_rows import AUTHORS, ragged
from tests.fakes.runs import SilentDisplay, StopAfter, save_qwen2, small_config


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A whole model, and adapters on it that already say something of their own."""
    base = save_qwen2(tmp_path_factory.mktemp("models") / "base", layers=2)
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


def same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


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
    batch = build_batch(ragged(), AUTHORS)
    with_adapters, _ = score(actor, batch, max_tokens=64)
    reference, _ = score(WithoutAdapters(actor), batch, max_tokens=64)
    below, _ = score(Actor(load_model(ModelSection(), base).model), batch, max_tokens=64)
    assert torch.equal(reference, below)
    assert float((with_adapters - reference).abs().max()) > 0.01
    # Afterwards everything is as it was.
    assert torch.equal(score(actor, batch, max_tokens=64)[0], with_adapters)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trained


def test_critic_of_a_model_with_adapters_trains_adapters_of_its_own_and_the_head(lora: tuple[Path, Path]) -> None:
    critic = Critic(Actor(load_model(ModelSection(), lora[1]).model))
    trained = [name for name, parameter in critic.weights.named_parameters() if parameter.requires_grad]
    assert {"head.weight", "head.bias"} < set(trained)
    assert all("lora_" in name or name.startswith("head.") for name in trained)


# Adapters that a run begins with


def with_lora(folder: Path, model: Path, **sections: dict[str, Any]) -> RunConfig:
    return small_config(folder, model, **{"lora": {"rank": 2}, **sections})


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def test_new_adapters_are_on_all_linear_layers_but_the_head_and_inert(lora: tuple[Path, Path], tmp_path: Path) -> None:
    config = with_lora(tmp_path, lora[0])
    before = torch.get_rng_state()
    model = load_policy(config, lora[0]).model
    assert torch.equal(torch.get_rng_state(), before)
    # Four of attention and three of the MLP in each of two layers, two thin matrices each.
    new = trained(model)
    assert len(new) == (4 + 3) * 2 * 2
    assert {min(matrix.shape) for matrix in new.values()} == {2}
    batch = build_batch(ragged(), AUTHORS)
    below = score(Actor(load_model(ModelSection(), lora[0]).model), batch, max_tokens=64)[0]
    assert torch.equal(score(Actor(model), batch, max_tokens=64)[0], below)
    # The run's seed makes them, and nothing else.
    assert same_bits(trained(load_policy(config, lora[0]).model), new)
    other = trained(load_policy(with_lora(tmp_path, lora[0], run={"seed": 1}), lora[0]).model)
    assert not any(torch.equal(other[name], new[name]) for name in new if "lora_A" in name)


def test_adapter_adds_alpha_over_rank_of_what_it_has_learned(lora: tuple[Path, Path], tmp_path: Path) -> None:
    shape = {"rank": 4, "alpha": 6, "target_modules": ["v_proj", "layers.1.mlp.up_proj"]}
    model: Any = load_policy(with_lora(tmp_path, lora[0], lora=shape), lora[0]).model
    layers = {name.partition(".lora_")[0] for name in trained(model)}
    assert layers == {f"model.layers.{i}.self_attn.v_proj" for i in range(2)} | {"model.layers.1.mlp.up_proj"}
    layer = model.model.layers[1].mlp.up_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    with torch.no_grad():
        b.normal_()
        x = torch.randn(3, 32)
        expected = x @ layer.base_layer.weight.T + 6 / 4 * x @ a.T @ b.T
        torch.testing.assert_close(layer(x), expected)


@pytest.mark.slow
def test_run_with_lora_trains_and_keeps_adapters_alone_and_resumes(lora: tuple[Path, Path], tmp_path: Path) -> None:
    base = lora[0]
    sections: dict[str, Any] = {
        "kl": {"loss_coef": 0.1},
        "optimizer": {"name": "sgd", "learning_rate": 0.5},
        "batch": {"mini_batch": 16},
    }
    display = SilentDisplay()
    frozen = (base / "model.safetensors").read_bytes()
    whole = train(with_lora(tmp_path / "a", base, **sections), display=display)
    assert (base / "model.safetensors").read_bytes() == frozen
    # The reference is the model below, which is the policy of the first step: the adapters begin at 0.
    kl = [iteration["actor/kl_loss"] for iteration in display.iterations]
    assert abs(kl[0]) < 1e-6 < 1e-4 < kl[-1]
    policies = sorted((whole.folder / "policies").iterdir())
    first, last = (load_file(path / "adapter_model.safetensors") for path in (policies[0], policies[-1]))
    assert not any(torch.equal(first[name], last[name]) for name in first)
    assert not list(whole.folder.rglob("model.safetensors"))
    kept = read_tensors(whole.folder / "checkpoints" / "000003" / "state")
    moments = [name for name in kept if name.endswith("/sgd.momentum_buffer")]
    assert len(moments) == len(first)
    assert all(".lora_" in name for name in moments)

    again = with_lora(tmp_path / "b", base, **sections)
    assert train(again, display=StopAfter(1)).iterations == 1
    resumed = train(again, resume=True, display=SilentDisplay())
    assert same_bits(adapters(resumed.folder), adapters(whole.folder))
    # A snapshot is a model of its own, from wherever it is loaded; a run knows what lies below it.
    loaded = trained(load_model(ModelSection(), policies[-1]).model)
    assert evaluate_run(whole.folder, Asked(tasks=2), policy=3).evaluation.tasks == 2
    store = ReplayStore.open(whole.folder / "replay.sqlite", read_only=True)
    with closing(store):
        folder = open_run_folder(whole.folder)
        check = check_log_probs(store, folder, weights_of_run(folder))
    assert [found.version for found in check.policies] == [0, 1, 2]
    # What the run began with, the whole model, has its new adapters on.
    got = trained(load_weights(folder, weights_of_run(folder)[0]).model).keys()
    assert got == trained(load_weights(folder, policies[-1]).model).keys()
    assert check.worst < 1e-4
    moved = base.rename(base.with_name("moved"))
    try:
        assert same_bits(trained(load_policy(again, moved, saved=policies[-1]).model), loaded)
    finally:
        moved.rename(base)


@pytest.mark.slow
def test_sft_with_lora_trains_adapters_and_resumes_equal(lora: tuple[Path, Path], tmp_path: Path) -> None:
    said = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"}]
    data = tmp_path / "data.jsonl"
    data.write_text(f"{json.dumps({'messages': said})}\n" * 4)
    section = {"data": str(data), "held_out": str(data), "epochs": 4, "batch": 4, "every": 2, "learning_rate": 0.05}

    def config(folder: Path) -> RunConfig:
        return with_lora(folder, lora[0], sft=section)

    whole = sft(config(tmp_path / "a"), display=SilentDisplay())
    assert whole.held_out_after < whole.held_out_before
    stopped = sft(config(tmp_path / "b"), display=SilentDisplay())
    shutil.rmtree(stopped.folder / "checkpoints" / "000004")
    shutil.rmtree(stopped.model)
    resumed = sft(config(tmp_path / "b"), resume=True, display=SilentDisplay())
    left, right = (load_file(result.model / "adapter_model.safetensors") for result in (resumed, whole))
    assert same_bits(left, right)
    assert not list(whole.folder.rglob("model.safetensors"))
    # What it leaves is trained on as it is.
    with pytest.raises(UserError, match="lora.rank must be 0 when model.path has adapters, which are then trained"):
        load_policy(with_lora(tmp_path, whole.model), whole.model)


REFUSED = [
    (["q_proj", name], f"between embeddings and head, got '{name}'. This model has down_proj, gate_")
    for name in ("lm_head", "embed_tokens", "nope")
]


@pytest.mark.parametrize(
    ("of", "said"),
    [*REFUSED, (["input_layernorm"], r"lora.target_modules must name linear layers, got \['input_layernorm'\]")],
)
def test_layers_without_adapters_are_refused(lora: tuple[Path, Path], tmp_path: Path, of: list[str], said: str) -> None:
    config = with_lora(tmp_path, lora[0], lora={"rank": 2, "target_modules": of})
    with pytest.raises(UserError, match=said):
        load_policy(config, lora[0])


def test_adapters_without_peft_are_refused(
    lora: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"model.path with the adapters in .*pip install 'agentloop-replay\[peft\]'"):
        load_model(ModelSection(), lora[1])
    with pytest.raises(UserError, match=r"lora.rank must not be used without its extra .*pip install 'agentloop"):
        load_policy(with_lora(tmp_path, lora[0]), lora[0])
