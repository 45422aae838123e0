"""Adapters on a frozen model, as the configuration says it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from replay.section import Positive, Section

LayerNames = Annotated[tuple[str, ...], Field(min_length=1)]


class LoraSection(Section):
    """LoRA (Hu et al. 2021, arXiv 2106.09685): what is trained are two thin matrices beside each layer's own."""

    rank: int = Field(
        0, ge=0, description="Rank of the adapters, which alone are then trained; 0: none, all of the model is."
    )
    alpha: Positive = Field(32, description="What an adapter adds is scaled by alpha / rank.")
    target_modules: Literal["auto"] | LayerNames = Field(
        "auto",
        description="Names of the layers that get one, e.g. [q_proj, v_proj]; auto: all linear ones but the head.",
    )

    def check(self) -> None:
        """What shapes adapters is not said where there are none."""
        if self.rank > 0:
            return
        for name, value in self:
            default = LoraSection.model_fields[name].default
            if value != default:
                shown = list(value) if isinstance(value, tuple) else value
                raise ValueError(
                    f"lora.{name} must be left at {default} when lora.rank is 0, for there are no adapters, "
                    f"got {shown}. Take it out, or set lora.rank."
                )
