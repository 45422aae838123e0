"""One iteration's data flow for people: what each role hands on, under our names and the field's usual ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentloop.algorithms.gae import at_last_action_token
from agentloop.learning.batch import ScoredBatch
from agentloop.learning.update_stats import UpdateResult
from replay.records import FRESH

_SHOWN = 3
"""Action tokens from either end of the row that is looked into."""
_SHOWN_METRICS = ("actor/", "critic/")


@dataclass(frozen=True)
class _Line:
    role: str
    name: str
    usual_name: str
    values: Tensor | None
    """[B, T], or [B]. None: there is none; NaN: a token's is unknown."""
    why_unknown: str = ""


def describe_batch(
    scored: ScoredBatch,
    *,
    penalised: bool,
    text: Callable[[list[int]], str],
) -> str:
    """Arrays of a batch before its first optimizer step: shape, type, and the values at a few action tokens.

    Those are the first and the last ones (there is the score) of the trained trajectory with the highest reward, a
    successful one if there is any, and of equal ones a fresh one. `penalised`: whole rewards were charged for the KL,
    and the rows' rewards are what is left; `text` decodes token ids.
    """
    batch = scored.batch
    row = _row_to_show(scored)
    columns = batch.response_mask[row].nonzero()[:, 0]
    if len(columns) > 2 * _SHOWN:
        columns = torch.cat([columns[:_SHOWN], columns[-_SHOWN:]])
    member = batch.members[int(batch.trajectory[row])]
    owner = member.trajectory.record
    counts = (
        f"{batch.num_trajectories} trajectories ({int(batch.replayed.sum())} replayed) in "
        f"{len(batch.trajectory)} rows of up to {batch.token_ids.shape[1]} tokens: "
        f"{int(batch.response_mask.sum())} action tokens, {int(batch.loss_mask.sum())} trained"
    )
    words = " ".join(repr(text([int(batch.token_ids[row, t])])) for t in columns)
    lines = [
        "data flow of one iteration, as its optimizer steps will see it",
        counts,
        f"values: row {row} (trajectory {owner.id[:8]}, {member.stream}, {'success' if owner.success else 'failure'}, "
        f"reward {owner.reward:g}, the batch's best, ended by {owner.stop_reason}), tokens {columns.tolist()}: {words}",
        "",
        _cells("role", "here", "usual_name", "shape, type", "values"),
    ]
    return "\n".join(lines + [_shown(line, row, columns) for line in _arrays(scored, penalised=penalised)])


def describe_update(result: UpdateResult) -> str:
    """What the optimizer steps made of it."""
    shown = {name: value for name, value in result.metrics.items() if name.startswith(_SHOWN_METRICS)}
    width = max(len(name) for name in shown)
    lines = [f"{name:<{width}}  {value:.5g}" for name, value in sorted(shown.items())]
    return "\n".join(["", f"after {result.optimizer_steps} optimizer steps", *lines, ""])


def _arrays(scored: ScoredBatch, *, penalised: bool) -> list[_Line]:
    batch, critic = scored.batch, scored.critic
    earned = [member.trajectory.record.reward for member in batch.members]
    left = [member.reward for member in batch.members] if penalised else earned
    no_behavior = "no policy sampled this token in this context, or it is not known"
    no_entropy = "old log-probs are those stored when the row was sampled, which takes no pass"
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
        _Line("rollout", "behavior_log_probs", "rollout_log_probs", batch.behavior_log_probs, no_behavior),
        _Line("replay", "replay_mask", "exp_mask", batch.replay_mask),
        _Line("actor", "old_log_probs", "old_log_probs", scored.old_log_probs),
        _Line("actor", "entropies", "entropys", scored.entropies, no_entropy),
        _Line("reference", "ref_log_probs", "ref_log_prob", scored.ref_log_probs, no_reference),
        _Line("reward", "scores", "token_level_scores", scores),
        _Line("reward", "rewards", "token_level_rewards", rewards),
        _Line("critic", "values", "values", critic.values if critic else None, no_critic),
        _Line("critic", "returns", "returns", critic.returns if critic else None, no_critic),
        _Line("loss", "advantages", "advantages", batch.advantages),
    ]


def _row_to_show(scored: ScoredBatch) -> int:
    """The last row of the trajectory to show: there is the score."""
    batch = scored.batch
    trained = set(batch.trajectory[batch.loss_mask.any(dim=1)].tolist())

    def rank(position: int) -> tuple[bool, bool, float, bool]:
        member = batch.members[position]
        record = member.trajectory.record
        return position in trained, record.success, record.reward, member.stream == FRESH

    best = max(range(batch.num_trajectories), key=rank)
    rows = batch.trajectory == best
    wanted = rows & batch.loss_mask.any(dim=1) if best in trained else rows
    return int(wanted.nonzero()[-1, 0])


def _shown(line: _Line, row: int, columns: Tensor) -> str:
    if line.values is None:
        return _cells(line.role, line.name, line.usual_name, "none", line.why_unknown)
    form = f"{list(line.values.shape)} {str(line.values.dtype).removeprefix('torch.')}"
    chosen = line.values[row, columns] if line.values.ndim == 2 else line.values[row : row + 1]
    values = " ".join(_number(value) for value in chosen.tolist())
    if bool(chosen.isnan().any()):
        values += f"  (nan: {line.why_unknown})"
    return _cells(line.role, line.name, line.usual_name, form, values)


def _number(value: float | int | bool) -> str:
    return f"{value:>9.4g}" if isinstance(value, float) else f"{value!s:>9}"


def _cells(*cells: str) -> str:
    widths = (10, 19, 20, 19)
    return "".join(f"{cell:<{width}} " for cell, width in zip(cells, widths, strict=False)) + cells[-1]
