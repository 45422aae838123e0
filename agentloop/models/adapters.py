"""LoRA adapters on a frozen model: they are made or loaded, and switched off where the KL's reference is scored."""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentloop.config import RunConfig
from agentloop.config.seeds import derive_seed
from agentloop.errors import UserError, needing, one_line
from agentloop.models.actor import Actor
from agentloop.models.loading import LoadedModel, has_adapters, load_model, muted_libraries


def load_policy(config: RunConfig, first: Path | str, *, saved: Path | None = None) -> LoadedModel:
    """Load the weights that a run begins with at `first`, or the weights that it `saved` since.

    With `lora.rank` a run saves only adapters. They are put on the model at `first`, even if the run's folder has been
    moved. A saved whole model is loaded as it is. Raises UserError if the adapters don't fit the model.
    """
    shown = config.context
    load = partial(load_model, config.model, template=shown.template, template_args=shown.template_args)
    if config.lora.rank == 0 or (saved is not None and not (saved / "adapter_config.json").exists()):
        return load(saved or first)
    with needing("peft", "lora.rank"):
        import_module("peft")
    loaded = load(first)
    if has_adapters(loaded.model):
        raise UserError(
            f"lora.rank must be 0 when model.path has adapters, which are then trained, got {config.lora.rank} and "
            f"{str(first)!r}. Take lora.rank out, or name the model below them."
        )
    model: Any = loaded.model
    if saved is None:
        add_adapters(model, config, first)
    else:
        with muted_libraries():
            model.load_adapter(str(saved))
        model.enable_adapters()  # they are loaded frozen
    model.eval()
    return loaded


def add_adapters(model: Any, config: RunConfig, first: Path | str) -> None:
    """Put new adapters on the model. They change nothing yet: one matrix is 0, the other comes from the seed."""
    from peft import LoraConfig

    section = config.lora
    if section.target_modules != "auto":
        _check_names(model, section.target_modules)
    shape = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        target_modules="all-linear" if section.target_modules == "auto" else list(section.target_modules),
        lora_dropout=0.0,  # the policy is scored in evaluation mode, where there is none
        task_type="CAUSAL_LM",
        revision=config.model.revision,
    )
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(config.run.seed, "lora"))
        try:
            model.add_adapter(shape)
        except ValueError as error:
            raise UserError(
                f"lora.target_modules must name linear layers, got {list(section.target_modules)}: {one_line(error)}"
            ) from error
    if Path(first).is_dir():  # so that a published folder finds the model below it from anywhere
        model.peft_config["default"].base_model_name_or_path = str(Path(first).resolve())


def _check_names(model: Any, names: tuple[str, ...]) -> None:
    """Raises UserError for a name that no layer has, and for the embeddings or the head.

    The head's weight is used without its layer, so an adapter on the layer would have no effect.
    """
    layers = dict(model.named_modules())
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for name in names:
        found = [layer for path, layer in layers.items() if path == name or path.endswith(f".{name}")]
        if not found or any(layer is end for layer in found for end in ends):
            inner = {path: layer for path, layer in layers.items() if isinstance(layer, torch.nn.Linear)}
            kinds = sorted({path.rpartition(".")[2] for path, layer in inner.items() if layer not in ends})
            raise UserError(
                f"lora.target_modules must name layers between embeddings and head, got {name!r}. "
                f"This model has {', '.join(kinds)}."
            )


class WithoutAdapters(Actor):
    """The actor's own model, scored with its adapters switched off, so that no second copy of the weights is needed.

    It is the model below the adapters. That is the starting policy if the adapters began at zero, as LoRA's do.
    """

    def __init__(self, actor: Actor) -> None:
        super().__init__(actor.model, packs=actor.packs, compute=actor.compute)
        self._head = actor._head  # tried once for both: all ranks of a sharded model must do so together

    def log_probs(self, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Score tokens like the actor does, without adapters and without gradient."""
        self.model.disable_adapters()
        try:
            with torch.no_grad():
                return super().log_probs(*arguments, **named)
        finally:
            self.model.enable_adapters()


def reference_policy(config: RunConfig, first: Path | str, actor: Actor) -> Actor | None:
    """The policy that the KL is measured against; None where the configuration uses no KL."""
    section = config.kl
    if section.loss_coef == 0.0 and section.reward_coef == 0.0:
        return None
    if section.reference == "auto" and has_adapters(actor.model):
        return WithoutAdapters(actor)
    model = load_model(config.model, first).model
    model.requires_grad_(False)
    return Actor(model, packs=actor.packs, compute=actor.compute)
