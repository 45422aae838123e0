"""The trajectories and tokens that an objective clips most, with their text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentloop.algorithms.diagnostics import sum_by_trajectory
from agentloop.analysis.whatif.compared_rows import Row
from agentloop.analysis.whatif.result import ClippedToken, ClippedTrajectory
from agentloop.analysis.whatif.step import Ready
from agentloop.config.strict_yaml import shown
from agentloop.learning.gradients import losses_at_first
from context.tokens.codec import TokenCodec

_BEFORE = 12
"""Tokens of text shown before a clipped one,"""
_CHARACTERS = 40
"""and at most so many characters."""


def most_clipped(
    ready: Sequence[Ready], rows: Sequence[Row], codec: TokenCodec, most: int
) -> tuple[tuple[ClippedTrajectory, ...], tuple[ClippedToken, ...]]:
    """Of every objective, at most `most` of either: by share of clipped tokens, and by distance of the ratio from 1.

    Tokens that the dual clip decides count as clipped here.
    """
    trajectories: list[ClippedTrajectory] = []
    tokens: list[ClippedToken] = []
    for one in ready if most else ():
        found = losses_at_first(one.scored, one.loss.config, one.losses)
        clipped = found.policy.clipped | found.policy.clipped_lower
        trajectories += _trajectories(one, rows, clipped, most)
        tokens += _tokens(one, rows, codec, found.log_ratios.where(clipped, torch.nan), most)
    return tuple(trajectories), tuple(tokens)


def _trajectories(one: Ready, rows: Sequence[Row], clipped: Tensor, most: int) -> list[ClippedTrajectory]:
    batch = one.scored.batch
    counts = [sum_by_trajectory(mask, batch.trajectory, len(rows)).tolist() for mask in (clipped, batch.loss_mask)]
    there = [index for index in range(len(rows)) if counts[0][index]]
    there.sort(key=lambda index: (-counts[0][index] / counts[1][index], -counts[0][index]))
    return [
        ClippedTrajectory(
            one.loss.name,
            rows[index].item.trajectory.id,
            rows[index].bucket,
            rows[index].item.advantage,
            int(counts[0][index]),
            int(counts[1][index]),
        )
        for index in there[:most]
    ]


def _tokens(one: Ready, rows: Sequence[Row], codec: TokenCodec, log_ratios: Tensor, most: int) -> list[ClippedToken]:
    """`log_ratios` [B, T] is NaN where nothing clips."""
    batch = one.scored.batch
    distance = log_ratios.abs().nan_to_num(nan=-1.0).flatten()
    values, places = distance.topk(min(most, len(distance)))
    segments = [
        (row, position)
        for row in rows
        for position, segment in enumerate(row.item.trajectory.segments)
        if len(segment.tokens)
    ]
    found = []
    for place in places[values >= 0].tolist():
        line, at = divmod(place, log_ratios.shape[1])
        row, position = segments[line]
        ids = batch.token_ids[line].tolist()
        found.append(
            ClippedToken(
                objective=one.loss.name,
                trajectory=row.item.trajectory.id,
                bucket=row.bucket,
                segment=position,
                position=at,
                ratio=float(log_ratios[line, at].double().exp()),
                advantage=float(batch.advantages[line, at]),
                before=shown(codec.decode(ids[max(0, at - _BEFORE) : at])[-_CHARACTERS:]),
                text=shown(codec.decode([ids[at]])),
            )
        )
    return found
