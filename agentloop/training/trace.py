"""One iteration's data flow for people: what each role hands on, under our names and the field's usual ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from agentloop.algorithms.gae import at_last_action_token
from agentloop.learning.batch import ScoredBatch
from agentloop.learning.update_stats import UpdateResult
from replay.records import FRESH

_SHOWN = 3
"""Action tokens from either end of the row that is looked into."""

Array = tuple[str, str, str, Tensor | None, str]
"""Role, our name, the usual name; [B, T] or [B], None where there is none; why it, or a NaN in it, is unknown."""


def describe_batch(scored: ScoredBatch, *, penalised: bool, text: Callable[[list[int]], str]) -> str:
    """Arrays of a batch before its first optimizer step: shape, type, and the values at a few action tokens.

    They are the first and last ones of the trained trajectory with the highest reward, if possible successful and
    fresh. `penalised`: the rows' rewards are what the KL penalty left; `text` decodes token ids.
    """
    batch, row = scored.batch, _row_to_show(scored)
    columns = batch.response_mask[row].nonzero()[:, 0].tolist()
    if len(columns) > 2 * _SHOWN:
        columns = columns[:_SHOWN] + columns[-_SHOWN:]
    member = batch.members[int(batch.trajectory[row])]
    owner = member.trajectory.record
    words = " ".join(repr(text([int(batch.token_ids[row, t])])) for t in columns)
    lines = [
        "data flow of one iteration, as its optimizer steps will see it",
        f"{batch.num_trajectories} trajectories ({int(batch.replayed.sum())} replayed) in {len(batch.trajectory)} rows "
        f"of up to {batch.token_ids.shape[1]} tokens: {int(batch.response_mask.sum())} action tokens, "
        f"{int(batch.loss_mask.sum())} trained",
        f"values: row {row} (trajectory {owner.id[:8]}, {member.stream}, {'success' if owner.success else 'failure'}, "
        f"reward {owner.reward:g}, the batch's best, ended by {owner.stop_reason}), tokens {columns}: {words}",
        "",
        _cells("role", "here", "usual_name", "shape, type", "values"),
    ]
    return "\n".join(lines + [_shown(array, row, columns) for array in _arrays(scored, penalised=penalised)])


def describe_update(result: UpdateResult) -> str:
    """What the optimizer steps made of it."""
    shown = {name: value for name, value in result.metrics.items() if name.startswith(("actor/", "critic/"))}
    width = max(len(name) for name in shown)
    lines = [f"{name:<{width}}  {value:.5g}" for name, value in sorted(shown.items())]
    return "\n".join(["", f"after {result.optimizer_steps} optimizer steps", *lines, ""])


def _arrays(scored: ScoredBatch, *, penalised: bool) -> list[Array]:
    batch, critic = scored.batch, scored.critic
    no_critic = "this algorithm has no critic"
    no_behavior = "no policy sampled this token in this context, or it is not known"
    no_entropy = "old log-probs are those stored when the row was sampled, which takes no pass"
    no_reference = "no kl coefficient asks for it here"
    if penalised:
        no_reference = "whole rewards were charged for the distance to it, as they were collected"

    def at_last(values: Sequence[float]) -> Tensor:
        return at_last_action_token(batch.advantages.new_tensor(values), batch.response_mask, batch.trajectory)

    earned = [member.trajectory.record.reward for member in batch.members]
    left = [member.reward for member in batch.members] if penalised else earned
    scores, rewards = (critic.scores, critic.rewards) if critic else (at_last(earned), at_last(left))
    return [
        ("rollout", "token_ids", "responses", batch.token_ids, ""),
        ("rollout", "response_mask", "response_mask", batch.response_mask, ""),
        ("rollout", "loss_mask", "loss_mask", batch.loss_mask, ""),
        ("rollout", "behavior_log_probs", "rollout_log_probs", batch.behavior_log_probs, no_behavior),
        ("replay", "replay_mask", "exp_mask", batch.replay_mask, ""),
        ("actor", "old_log_probs", "old_log_probs", scored.old_log_probs, ""),
        ("actor", "entropies", "entropys", scored.entropies, no_entropy),
        ("reference", "ref_log_probs", "ref_log_prob", scored.ref_log_probs, no_reference),
        ("reward", "scores", "token_level_scores", scores, ""),
        ("reward", "rewards", "token_level_rewards", rewards, ""),
        ("critic", "values", "values", critic.values if critic else None, no_critic),
        ("critic", "returns", "returns", critic.returns if critic else None, no_critic),
        ("loss", "advantages", "advantages", batch.advantages, ""),
    ]


def _row_to_show(scored: ScoredBatch) -> int:
    """The last row of the trajectory to show: there is the score."""
    batch = scored.batch
    trains = batch.loss_mask.any(dim=1)
    trained = set(batch.trajectory[trains].tolist())

    def rank(position: int) -> tuple[bool, bool, float, bool]:
        member = batch.members[position]
        record = member.trajectory.record
        return position in trained, record.success, record.reward, member.stream == FRESH

    best = max(range(batch.num_trajectories), key=rank)
    rows = batch.trajectory == best
    return int((rows & trains if best in trained else rows).nonzero()[-1, 0])


def _shown(array: Array, row: int, columns: list[int]) -> str:
    role, name, usual_name, values, why_unknown = array
    if values is None:
        return _cells(role, name, usual_name, "none", why_unknown)
    form = f"{list(values.shape)} {str(values.dtype).removeprefix('torch.')}"
    chosen = (values[row, columns] if values.ndim == 2 else values[row : row + 1]).tolist()
    text = " ".join(f"{value:>9.4g}" if isinstance(value, float) else f"{value!s:>9}" for value in chosen)
    unknown = any(value != value for value in chosen)
    return _cells(role, name, usual_name, form, f"{text}  (nan: {why_unknown})" if unknown else text)


def _cells(*cells: str) -> str:
    widths = (10, 19, 20, 19)
    return "".join(f"{cell:<{width}} " for cell, width in zip(cells, widths, strict=False)) + cells[-1]
