"""One iteration's data flow for people: what each role hands on, under our names and the field's usual ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentloop.algorithms.gae import at_last_action_token
from agentloop.learning.scoring import ScoredBatch
from agentloop.learning.trainer import UpdateResult

_SHOWN = 3
"""Action tokens from either end of the row that is looked into."""
_TOLD = ("actor/", "critic/")


@dataclass(frozen=True)
class _Line:
    role: str
    name: str
    elsewhere: str
    values: Tensor | None
    """[B, T], or [B]. None: there is none, and `why_none` says why."""
    why_none: str = ""


def describe_batch(
    scored: ScoredBatch,
    *,
    penalised: bool,
    text: Callable[[list[int]], str],
) -> str:
    """Arrays of a batch before its first optimizer step: shape, type, and the values at a few action tokens.

    Those are the first and the last ones (there is the score) of the first trajectory with a trained token, a fresh one
    if there is any. `penalised`: whole rewards were charged for the KL, and the rows' rewards are what is left; `text`
    decodes token ids.
    """
    batch = scored.batch
    row = _row_to_show(scored)
    columns = batch.response_mask[row].nonzero()[:, 0]
    if len(columns) > 2 * _SHOWN:
        columns = torch.cat([columns[:_SHOWN], columns[-_SHOWN:]])
    owner = batch.members[int(batch.trajectory[row])].trajectory.record
    counts = (
        f"{batch.num_trajectories} trajectories ({int(batch.replayed.sum())} replayed) in "
        f"{len(batch.trajectory)} rows of up to {batch.token_ids.shape[1]} tokens: "
        f"{int(batch.response_mask.sum())} action tokens, {int(batch.loss_mask.sum())} trained"
    )
    words = " ".join(repr(text([int(batch.token_ids[row, t])])) for t in columns)
    lines = [
        "data flow of one iteration, as its optimizer steps will see it",
        counts,
        f"values: row {row} (trajectory {owner.id[:8]}, reward {owner.reward:g}, ended by {owner.stop_reason}), "
        f"tokens {columns.tolist()}: {words}",
        "",
        _cells("role", "here", "elsewhere", "shape, type", "values"),
    ]
    return "\n".join(lines + [_shown(line, row, columns) for line in _arrays(scored, penalised=penalised)])


def describe_update(result: UpdateResult) -> str:
    """What the optimizer steps made of it."""
    told = {name: value for name, value in result.metrics.items() if name.startswith(_TOLD)}
    width = max(len(name) for name in told)
    lines = [f"{name:<{width}}  {value:.5g}" for name, value in sorted(told.items())]
    return "\n".join(["", f"after {result.optimizer_steps} optimizer steps", *lines, ""])


def _arrays(scored: ScoredBatch, *, penalised: bool) -> list[_Line]:
    batch, critic = scored.batch, scored.critic
    earned = [member.trajectory.record.reward for member in batch.members]
    left = [member.reward for member in batch.members] if penalised else earned
    no_critic = "this algorithm has no critic"
    no_reference = "no kl coefficient asks for it here"
    if penalised:
        no_reference = "whole rewards were charged for the distance to it, as they were collected"

    def at_last(values: Sequence[float]) -> Tensor:
        return at_last_action_token(batch.advantages.new_tensor(values), batch.response_mask, batch.trajectory)

    scores, rewards = (critic.scores, critic.rewards) if critic else (at_last(earned), at_last(left))
    return [
        _Line("rollout", "token_ids", "responses", batch.token_ids),
        _Line("rollout", "response_mask", "response_mask", batch.response_mask),
        _Line("rollout", "loss_mask", "loss_mask", batch.loss_mask),
        _Line("rollout", "behavior_log_probs", "rollout_log_probs", batch.behavior_log_probs),
        _Line("replay", "replay_mask", "exp_mask", batch.replay_mask),
        _Line("actor", "old_log_probs", "old_log_probs", scored.old_log_probs),
        _Line("actor", "entropies", "entropys", scored.entropies),
        _Line("reference", "ref_log_probs", "ref_log_prob", scored.ref_log_probs, no_reference),
        _Line("reward", "scores", "token_level_scores", scores),
        _Line("reward", "rewards", "token_level_rewards", rewards),
        _Line("critic", "values", "values", critic.values if critic else None, no_critic),
        _Line("critic", "returns", "returns", critic.returns if critic else None, no_critic),
        _Line("loss", "advantages", "advantages", batch.advantages),
    ]


def _row_to_show(scored: ScoredBatch) -> int:
    batch = scored.batch
    trained = batch.loss_mask.any(dim=1)
    for wanted in (trained & ~batch.replay_mask, trained, torch.ones_like(trained)):
        found = wanted.nonzero()[:, 0]
        if len(found):
            # The last row of its trajectory, where the score is.
            owner = batch.trajectory[found[0]]
            return int((wanted & (batch.trajectory == owner)).nonzero()[-1, 0])
    raise ValueError("a batch must have rows, got none.")


def _shown(line: _Line, row: int, columns: Tensor) -> str:
    if line.values is None:
        return _cells(line.role, line.name, line.elsewhere, "none", line.why_none)
    form = f"{list(line.values.shape)} {str(line.values.dtype).removeprefix('torch.')}"
    chosen = line.values[row, columns] if line.values.ndim == 2 else line.values[row : row + 1]
    values = " ".join(_number(value) for value in chosen.tolist())
    return _cells(line.role, line.name, line.elsewhere, form, values)


def _number(value: float | int | bool) -> str:
    return f"{value:>9.4g}" if isinstance(value, float) else f"{value!s:>9}"


def _cells(*cells: str) -> str:
    widths = (10, 19, 20, 19)
    return "".join(f"{cell:<{width}} " for cell, width in zip(cells, widths, strict=False)) + cells[-1]
