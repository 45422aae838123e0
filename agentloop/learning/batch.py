"""Makes tensors of trajectories, one row per training sequence, and cuts them into optimizer steps and passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentloop.algorithms.declarations import Member
from agentloop.algorithms.objective_input import ObjectiveInput, TokenRows
from agentloop.config import RunConfig
from context.authors import AuthorTable
from context.tokens.loss_mask import loss_mask, response_mask
from replay.mixing.apportion import apportion
from replay.records import FRESH, REPLAY, BatchRow, Trajectory


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch(TokenRows):
    """One iteration's rows. Index t of every [B, T] array describes token t; checks its own masks."""

    token_ids: Tensor
    """[B, T] int64; 0 where padded."""
    attention_mask: Tensor
    """[B, T] bool: a real token."""
    response_mask: Tensor
    """[B, T] bool: an action token."""
    replay_mask: Tensor
    """[B] bool: drawn from the buffer."""
    hinted: Tensor
    """[B] bool: a fresh row of a trajectory that was sampled while a hint was shown."""
    loss_weights: Tensor
    """[B] float32: factor on the loss of the row's tokens; it is in no denominator."""
    temperature: Tensor
    """[B] float32: temperature at which the row was sampled."""
    members: tuple[BatchRow, ...]
    """The trajectories, each once; `trajectory` holds indices into them."""

    def __post_init__(self) -> None:
        if bool((self.loss_mask & ~self.response_mask).any()):
            raise ValueError("loss_mask must be within response_mask, got a trained token that is no action token.")
        if bool((self.response_mask & ~self.attention_mask).any()):
            raise ValueError("response_mask must be within attention_mask, got an action token in the padding.")

    @property
    def num_trajectories(self) -> int:
        return len(self.members)

    @property
    def trajectory_ids(self) -> tuple[str, ...]:
        return tuple(member.trajectory.id for member in self.members)

    @property
    def lengths(self) -> list[int]:
        """Real tokens of each row."""
        lengths: list[int] = self.attention_mask.sum(dim=1).tolist()
        return lengths

    @property
    def replayed(self) -> Tensor:
        """[N] bool, one per trajectory."""
        flags = torch.zeros(len(self.members), dtype=torch.bool, device=self.replay_mask.device)
        return flags.index_put((self.trajectory,), self.replay_mask)

    @property
    def signal_share(self) -> Tensor:
        """[B] float64: share with an advantage other than 0, among the trained trajectories of the row's stream.

        If there is none, it is 1 / their number: then only zeros are divided by it.
        """
        replayed = self.replayed
        trained, with_signal = torch.zeros_like(replayed), torch.zeros_like(replayed)
        trained[self.trajectory[self.loss_mask.any(dim=1)]] = True
        with_signal[self.trajectory[(self.loss_mask & (self.advantages != 0)).any(dim=1)]] = True
        counts = torch.stack([with_signal & ~replayed, with_signal & replayed, trained & ~replayed, trained & replayed])
        found, all_of_them = counts.sum(dim=1).clamp_min(1).double().split(2)
        shares: Tensor = found / all_of_them
        return shares[self.replay_mask.long()]

    def objective_input(
        self, log_probs: Tensor, anchors: Tensor, *, signal_share: Tensor | None = None
    ) -> ObjectiveInput:
        """Make the input of these rows' objective; both arrays are [B, T], in nats.

        `signal_share` is the share in the whole optimizer step. None: these rows are the whole step.
        """
        return ObjectiveInput(
            log_probs=log_probs,
            anchors=anchors,
            **{f.name: getattr(self, f.name) for f in fields(TokenRows)},
            num_trajectories=len(self.members),
            signal_share=self.signal_share if signal_share is None else signal_share,
        )

    def select(self, positions: Tensor) -> Batch:
        """Select rows, and cut them to the longest of them. They keep their trajectories' indices."""
        width = int(self.attention_mask[positions].any(dim=0).sum())
        return self._map(lambda t: t[positions, :width] if t.ndim == 2 else t[positions])

    def passes(self, rows: Tensor, *, max_tokens: int, packs: bool, whole: bool = False) -> list[Tensor]:
        """Positions of the rows, [B] bool, in each pass through a model: see `cut_micro_batches`. `whole`: all of one
        trajectory's are in the same pass."""
        positions = rows.nonzero()[:, 0]
        lengths: list[int] = self.attention_mask[positions].sum(dim=1).tolist()
        trajectories: list[int] | None = self.trajectory[positions].tolist() if whole else None
        cuts = cut_micro_batches(lengths, max_tokens, packs=packs, trajectories=trajectories)
        return [positions[torch.tensor(cut, device=positions.device)] for cut in cuts]

    def to(self, device: torch.device) -> Batch:
        return self._map(lambda t: t.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        arrays = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "members"}
        changed: dict[str, Any] = {name: change(array) for name, array in arrays.items()}
        return replace(self, **changed)


@dataclass(frozen=True, eq=False)
class ScoredBatch:
    """A batch with its log-probs before the first optimizer step of the iteration."""

    batch: Batch
    old_log_probs: Tensor
    """[B, T] nats; 0 where not an action token."""
    ref_log_probs: Tensor | None
    """[B, T] nats; None where no reference is needed."""
    values: Tensor | None = None
    """[B, T] reward units: the critic's estimates before the first optimizer step of the iteration, 0 outside of action
    tokens; None without a critic."""
    returns: Tensor | None = None
    """[B, T] reward units: the critic's targets, advantages + values before advantages are whitened; None as values."""
    importance_weights: Tensor | None = None
    """[B, T]: factor on the policy loss of a token; None: 1."""
    entropies: Tensor | None = None
    """[B, T] nats, of the whole batch; NaN where log-probs needed no pass. Components of a batch have none."""
    reuses: bool = False
    """True if some old log-probs were stored when their rows were sampled."""

    def select(self, positions: Tensor) -> ScoredBatch:
        """Select rows, and cut them to the longest of them."""
        batch = self.batch.select(positions)
        width = batch.token_ids.shape[1]
        arrays = (self.ref_log_probs, self.values, self.returns, self.importance_weights)
        ref, values, returns, weights = (None if array is None else array[positions, :width] for array in arrays)
        old = self.old_log_probs[positions, :width]
        return ScoredBatch(batch, old, ref, values, returns, weights, reuses=self.reuses)


def build_batch(rows: Sequence[BatchRow], authors: AuthorTable) -> Batch:
    """Make tensors of the rows' segments, in order; masks come from the authors of the tokens.

    Raises ValueError for an empty batch, a trajectory that occurs twice, is empty, was sampled greedily, or
    has an advantage that is not finite or of another length than its tokens.
    """
    _check(rows)
    segments = [
        (index, segment.tokens, advantages)
        for index, row in enumerate(rows)
        for segment, advantages in zip(row.trajectory.segments, _token_advantages(row), strict=True)
        if len(segment.tokens)
    ]
    owners = [rows[index] for index, _, _ in segments]
    masks = {
        "attention_mask": [np.ones(len(tokens), np.bool_) for _, tokens, _ in segments],
        "response_mask": [response_mask(tokens, authors) for _, tokens, _ in segments],
        "loss_mask": [loss_mask(tokens, authors) for _, tokens, _ in segments],
    }
    padded = {name: _padded(arrays, False, np.bool_) for name, arrays in masks.items()}
    advantages = _padded([values for _, _, values in segments], 0.0, np.float32)
    return Batch(
        token_ids=_padded([tokens.token_ids for _, tokens, _ in segments], 0, np.int64),
        behavior_log_probs=_padded([tokens.behavior_log_probs for _, tokens, _ in segments], np.nan, np.float32),
        advantages=torch.where(padded["loss_mask"], advantages, 0.0),
        replay_mask=torch.tensor([row.stream == REPLAY for row in owners]),
        hinted=torch.tensor([row.stream == FRESH and _has(row, "hinted") for row in owners]),
        loss_weights=torch.tensor([row.weight for row in owners], dtype=torch.float32),
        temperature=torch.tensor([row.trajectory.record.temperature for row in owners], dtype=torch.float32),
        trajectory=torch.tensor([index for index, _, _ in segments]),
        members=tuple(rows),
        **padded,
    )


def _has(row: BatchRow, context: str) -> bool:
    return any(segment.behavior_context == context for segment in row.trajectory.segments)


def _check(rows: Sequence[BatchRow]) -> None:
    if not rows:
        raise ValueError("rows must hold at least one trajectory, got none.")
    seen: set[str] = set()
    for row in rows:
        where = f"trajectory {row.trajectory.id}"
        if row.trajectory.id in seen:
            raise ValueError(f"{where} must occur once in a batch, got it twice. Draw without replacement.")
        seen.add(row.trajectory.id)
        if not any(len(segment.tokens) for segment in row.trajectory.segments):
            raise ValueError(f"{where} must have at least one token, got none.")
        if not row.trajectory.record.temperature > 0.0:
            raise ValueError(f"{where}: temperature must be > 0 to be scored, got {row.trajectory.record.temperature}.")
        if not math.isfinite(row.advantage):
            raise ValueError(f"{where}: advantage must be finite, got {row.advantage}. Check its group's rewards.")


def _token_advantages(row: BatchRow) -> Sequence[npt.NDArray[np.float32]]:
    lengths = [len(segment.tokens) for segment in row.trajectory.segments]
    if row.token_advantages is None:
        return [np.full(length, row.advantage, np.float32) for length in lengths]
    given = [len(values) for values in row.token_advantages]
    if given != lengths or not all(np.isfinite(values).all() for values in row.token_advantages):
        raise ValueError(
            f"trajectory {row.trajectory.id}: token_advantages must be finite and one per token of its segments "
            f"({lengths}), got {given}."
        )
    return row.token_advantages


def _padded(arrays: Sequence[npt.NDArray[np.generic]], fill: float, dtype: type[np.generic]) -> Tensor:
    width = max(len(array) for array in arrays)
    table = np.full((len(arrays), width), fill, dtype)
    for row, array in zip(table, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(table)


def members_of(rows: Sequence[BatchRow]) -> list[Member]:
    """Make the members that a baseline compares from the rows of a batch."""
    return [replace(member_of(row.trajectory, row.reward), replayed=row.stream == REPLAY) for row in rows]


def member_of(row: Trajectory, reward: float) -> Member:
    """Make the member that a baseline compares from a trajectory."""
    record = row.record
    return Member(reward, record.num_action_tokens, record.group, record.task)


def plan_optimizer_steps(batch: Batch, config: RunConfig, *, iteration: int) -> list[list[int]]:
    """Choose the trajectories of each optimizer step of the iteration: the mini-batches of every epoch."""
    groups = [None if member.stream == REPLAY else member.trajectory.record.group for member in batch.members]
    plan: list[list[int]] = []
    for epoch in range(config.batch.ppo_epochs):
        plan += plan_mini_batches(groups, config.batch.mini_batch, seed=(config.run.seed, iteration, epoch))
    return plan


def plan_mini_batches(groups: Sequence[str | None], size: int, *, seed: Sequence[int]) -> list[list[int]]:
    """Distribute the positions of all trajectories over ceil(len(groups) / size) mini-batches.

    `groups` names the group of each fresh trajectory, None for a replayed one. Groups stay whole and are distributed as
    evenly as their sizes allow, so a mini-batch can be larger or smaller than `size`. If there are
    groups for all, each has the batch's fresh:replay split within one trajectory. Only `seed` decides the distribution.
    """
    count = -(-len(groups) // size)
    if count == 0:
        return []
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(list(seed))))
    members: dict[str, list[int]] = {}
    replayed: list[int] = []
    for position in random.permutation(len(groups)).tolist():
        group = groups[position]
        (replayed if group is None else members.setdefault(group, [])).append(position)
    bins: list[list[int]] = [[] for _ in range(count)]
    # The largest first, each into the emptiest: sizes differ by at most the largest group.
    for rows in sorted(members.values(), key=len, reverse=True):
        min(bins, key=len).extend(rows)
    shares = [len(rows) / (len(groups) - len(replayed)) for rows in bins] if all(bins) else [1 / count] * count
    start = 0
    for rows, number in zip(bins, apportion(len(replayed), shares), strict=True):
        rows.extend(replayed[start : start + number])
        start += number
    return [sorted(rows) for rows in bins]


def cut_micro_batches(
    lengths: Sequence[int], max_tokens: int, *, packs: bool = False, trajectories: Sequence[int] | None = None
) -> list[list[int]]:
    """Cut rows into passes and return their positions: at most `max_tokens` tokens, at least one row in each pass.

    Padded rows are sorted by length, and padding counts. Packed rows stay in order, because a group's rows begin alike.
    With `trajectories`, one for each row, all rows of a trajectory are in the same pass, however long they are.
    """
    rows: dict[int, list[int]] = {}
    for position, trajectory in enumerate(range(len(lengths)) if trajectories is None else trajectories):
        rows.setdefault(trajectory, []).append(position)
    longest = {trajectory: max(lengths[position] for position in rows[trajectory]) for trajectory in rows}
    cuts: list[list[int]] = []
    for trajectory in rows if packs else sorted(rows, key=lambda trajectory: longest[trajectory]):
        whole = rows[trajectory]
        together = [*cuts[-1], *whole] if cuts else whole
        # Ascending order: the newest row is the longest, and sets the padded width.
        tokens = sum(lengths[p] for p in together) if packs else len(together) * longest[trajectory]
        if cuts and tokens <= max_tokens:
            cuts[-1] = together
        else:
            cuts.append(whole)
    return cuts
