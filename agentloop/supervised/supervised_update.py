"""Supervised learning of written tokens: the warm-up of the built-in model and `agentloop sft` share it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentloop.learning.batch import cut_micro_batches
from agentloop.models.actor import Actor
from context import AuthorTable, TokenSequence, loss_mask


@dataclass(frozen=True)
class Learned:
    loss: float
    """Mean loss of the trained tokens, nats."""
    tokens: int
    """Number of trained tokens."""
    token_losses: tuple[tuple[float, ...], ...]
    """-log-prob by row and token, nats; 0 for tokens that are not trained."""


def learn(actor: Actor, rows: Sequence[TokenSequence], authors: AuthorTable, *, max_tokens: int) -> Learned:
    """Add the gradient of the mean loss of the rows' trained tokens to the model's, and measure the loss.

    Under `torch.no_grad` the loss is only measured.

    The loss is the cross-entropy at temperature 1 of tokens by trained authors. All tokens of all rows weigh the same,
    whatever the cut into passes of `max_tokens` tokens.
    """
    masks = [torch.from_numpy(loss_mask(row, authors)) for row in rows]
    tokens = sum(int(mask.sum()) for mask in masks)
    if tokens == 0:
        raise ValueError("rows must hold a token by a trained author, got none.")
    token_losses: list[tuple[float, ...]] = [()] * len(rows)
    total = 0.0
    for cut in cut_micro_batches([len(row) for row in rows], max_tokens, packs=actor.packs):
        losses = -row_log_probs(actor, [rows[i].token_ids.tolist() for i in cut], [masks[i] for i in cut])
        whole = losses.sum()
        if torch.is_grad_enabled():
            (whole / tokens).backward()
        total += float(whole.detach())
        for place, i in enumerate(cut):
            token_losses[i] = tuple(losses[place, : len(rows[i])].tolist())
    return Learned(total / tokens, tokens, tuple(token_losses))


def row_log_probs(actor: Actor, rows: Sequence[Sequence[int]], masks: Sequence[Tensor]) -> Tensor:
    """Log-probs at temperature 1 of the tokens in the masks, [B, T] nats, 0 elsewhere."""
    device = actor.device
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)
    mask = pad_sequence(list(masks), batch_first=True).to(device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    attention = torch.arange(ids.shape[1], device=device)[None] < lengths[:, None]
    temperature = torch.ones(len(rows), device=device)
    log_probs, _ = actor.log_probs(ids, attention, mask, temperature, entropy=False)
    return log_probs
