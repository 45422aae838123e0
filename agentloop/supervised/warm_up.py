"""Supervised warm-up of the built-in model on an environment's own careless demonstrations.

With Muon on the hidden matrices, copying is learned within seconds. The warm-up ends soon after the hardest token of
the last reply has become easy.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from agentloop.config import WarmUpSection
from agentloop.learning.optimizer import hidden_matrices
from agentloop.models.actor import Actor
from agentloop.supervised.supervised_update import learn
from context import AuthorTable, ContextManager, Message, ReplyParser, TokenSequence, loss_mask
from context.authors import LLM
from context.strategies import Strategy
from context.templates.render import Renderer

_SMOOTHING = 0.9
_RATE_OF_MATRICES, _RATE_OF_REST = 2e-2, 5e-3
_ENDLESS = 1 << 30
_MICRO_BATCH_TOKENS = 1536
Progress = Callable[[int, float], None]
"""Called with the number of updates and the smoothed loss."""


@dataclass(frozen=True)
class WarmUpResult:
    updates: int
    loss: float
    """Smoothed loss of the last reply's hardest token, nats."""


def demonstrated_sequences(
    conversation: Sequence[Message],
    renderer: Renderer,
    *,
    parser: ReplyParser,
    tools: Sequence[Mapping[str, Any]],
    strategy: Strategy,
) -> list[TokenSequence]:
    """The training sequences of a conversation; its replies have the author `demonstration` and no log-probs.

    A strategy that rewrites the context makes several sequences. One that stops the episode ends them early.
    """
    conversation = renderer.template.with_call_ids(conversation)
    context = ContextManager(renderer, parser, max_tokens=_ENDLESS, strategy=strategy)

    def say(reply: Message) -> None:
        ids = renderer.reply(context.prompt, reply, parser)[: context.room]
        context.record_reply(ids, [math.nan] * len(ids), policy_version=0)

    first = next(i for i, message in enumerate(conversation) if message.author == LLM)
    context.begin(conversation[:first], tools)
    results: list[Message] = []
    for message in conversation[first:]:
        if message.author != LLM:
            results.append(message)
            continue
        if results:
            context.observe(results)
            results = []
        while context.question is not None and context.stopped is None:
            say(Message("assistant", context.question.example))
        if context.stopped is not None:
            break
        say(message)
    sequences = [segment.tokens for segment in context.segments()]
    return [tokens for tokens in sequences if loss_mask(tokens, renderer.authors).any()]


def warm_up(
    actor: Actor,
    demonstrated: Iterator[Sequence[TokenSequence]],
    section: WarmUpSection,
    *,
    authors: AuthorTable,
    control_ids: frozenset[int],
    progress: Progress,
) -> WarmUpResult:
    """Train `actor` in place until it copies the endless `demonstrated`, then `updates_after_target` more updates."""
    optimizers = _optimizers(actor.model)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    smoothed, cooling_from, update = math.nan, math.inf, 0
    for update in range(1, section.max_updates + 1):
        batch = [next(demonstrated) for _ in range(section.batch)]
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        hardest = _accumulate(actor, batch, authors, control_ids)
        # High rates find copying quickly, but leave weights from which the first step of reinforcement learning can
        # lose the format. So the rates fall to 0 over the last updates.
        cooling = 1.0 - max(0.0, update - cooling_from) / (section.updates_after_target + 1)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * cooling
            optimizer.step()
        smoothed = hardest if update == 1 else _SMOOTHING * smoothed + (1 - _SMOOTHING) * hardest
        progress(update, smoothed)
        if smoothed < section.loss_target:
            cooling_from = min(cooling_from, update)
        if update >= cooling_from + section.updates_after_target:
            break
    return WarmUpResult(update, smoothed)


def _accumulate(
    actor: Actor, demonstrated: Sequence[Sequence[TokenSequence]], authors: AuthorTable, control_ids: frozenset[int]
) -> float:
    """Add the gradients of the demonstrated tokens' mean loss. Returns the mean of `hardest_of_last_reply`."""
    rows = [row for sequences in demonstrated for row in sequences]
    learned = learn(actor, rows, authors, max_tokens=_MICRO_BATCH_TOKENS)
    hardest = 0.0
    for end in itertools.accumulate(len(sequences) for sequences in demonstrated):
        last = rows[end - 1]
        control = [token in control_ids for token in last.token_ids.tolist()]
        hardest += hardest_of_last_reply(learned.token_losses[end - 1], loss_mask(last, authors).tolist(), control)
    return hardest / len(demonstrated)


def hardest_of_last_reply(losses: Sequence[float], marked: Sequence[bool], control: Sequence[bool]) -> float:
    """The largest loss in the last reply, without its leading control tokens and the first token after them."""
    end = len(marked) - 1 - list(marked)[::-1].index(True)
    start = end
    while start > 0 and marked[start - 1]:
        start -= 1
    while start < end and control[start]:
        start += 1
    return max(losses[start + 1 : end + 1], default=losses[start])


def _optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    hidden, named = hidden_matrices(model), dict(model.named_parameters())
    matrices = [parameter for name, parameter in named.items() if name in hidden]
    rest = [parameter for name, parameter in named.items() if name not in hidden]
    return [
        torch.optim.Muon(matrices, lr=_RATE_OF_MATRICES, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=_RATE_OF_REST, betas=(0.9, 0.95), weight_decay=0.0),
    ]
