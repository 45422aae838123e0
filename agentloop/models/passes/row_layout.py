"""Where the tokens of rows are in a pass: side by side and filled up, or one row behind another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Where rows are among the N tokens of a pass."""

    new: list[int]
    """Tokens of each row that no row before it has; at least one."""
    whole: list[int]
    """All tokens of each row."""
    places: Tensor | None
    """[sum of whole]: which of the N tokens each row's are, one row behind another; None: the N as they are."""
    new_bounds: Tensor
    """[B + 1] int32: where each row's new tokens begin, and end."""
    whole_bounds: Tensor


@dataclass(frozen=True)
class Laid:
    """Tokens as a model takes them, and where to find each in what it returns."""

    inputs: dict[str, Any]
    places: Tensor
    """[B, T]: where each real token is among all positions."""


def padded(token_ids: Tensor) -> Laid:
    """[B, T] as it is; padding stands on the right, where causal attention alone keeps it out of every result."""
    places = torch.arange(token_ids.numel(), device=token_ids.device).view_as(token_ids)
    return Laid({"input_ids": token_ids}, places)


def packed(token_ids: Tensor, attention_mask: Tensor, *, within_rows: bool) -> Laid:
    """[1, N] real tokens alone. `within_rows`: what a row begins with like the one before it is not there again.

    Else positions that begin again at 0 tell the model where rows begin: Hugging Face models make a block-diagonal
    attention mask of them. A model that takes no notice of positions mixes rows up; `check_scoring` finds that out.
    """
    lengths = attention_mask.sum(dim=1)
    shared = torch.zeros_like(lengths)
    if within_rows:
        alike = (token_ids[1:] == token_ids[:-1]) & attention_mask[1:] & attention_mask[:-1]
        shared[1:] = alike.long().cumprod(dim=1).sum(dim=1)
        shared = torch.minimum(shared, lengths - 1)  # each row has a token of its own
    columns = torch.arange(token_ids.shape[1], device=token_ids.device)
    new = attention_mask & (columns >= shared[:, None])
    own = new.flatten().cumsum(0).view_as(token_ids) - 1
    # A token is where the last row before it that had it again has it.
    places = torch.where(new, own, 0).cummax(dim=0).values
    inputs = {"input_ids": token_ids[new][None], "position_ids": columns.expand_as(new)[new][None]}
    if not within_rows:
        return Laid(inputs, places)
    counts, ends = torch.stack([lengths - shared, lengths]), torch.zeros(2, len(lengths) + 1, dtype=torch.int32)
    bounds = ends.to(lengths.device)
    bounds[:, 1:] = counts.cumsum(dim=1)
    each, whole = counts.tolist()
    rows = PackedRows(each, whole, places[attention_mask] if sum(each) < sum(whole) else None, *bounds)
    return Laid({**inputs, "rows": rows}, places)
