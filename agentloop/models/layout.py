"""How the rows of a batch are laid out for a model: padded to one width, or packed one behind another."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, arange


@dataclass(frozen=True)
class Laid:
    """Tokens as a model takes them, and where to find each row in what it returns."""

    inputs: dict[str, Tensor]
    starts: Tensor
    """[B]: where each row begins among all positions, rows one behind another."""


def padded(token_ids: Tensor) -> Laid:
    """[B, T] as it is; padding stands on the right, where causal attention alone keeps it out of every result."""
    return Laid({"input_ids": token_ids}, arange(len(token_ids), device=token_ids.device) * token_ids.shape[1])


def packed(token_ids: Tensor, attention_mask: Tensor) -> Laid:
    """[1, N] real tokens alone. Positions that begin again at 0 tell the model where rows begin.

    Hugging Face models make a block-diagonal attention mask of them, and flash-attention kernels need none: a token
    sees its own row. A model that takes no notice of positions mixes rows up; `check_scoring` finds that out.
    """
    positions = (attention_mask.long().cumsum(dim=1) - 1)[attention_mask]
    lengths = attention_mask.sum(dim=1)
    inputs = {"input_ids": token_ids[attention_mask][None], "position_ids": positions[None]}
    return Laid(inputs, lengths.cumsum(0) - lengths)
