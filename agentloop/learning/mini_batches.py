"""How a batch is cut: a mini-batch per optimizer step, a micro-batch per forward-backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replay.mixing.apportion import apportion


def plan_mini_batches(groups: Sequence[str | None], size: int, *, seed: Sequence[int]) -> list[list[int]]:
    """Positions of the trajectories of each of the ceil(len(groups) / size) mini-batches; none lost, none
    twice.

    `groups` names the group of each fresh trajectory, None for a replayed one. Groups stay whole and are
    spread as evenly as their sizes allow, so a mini-batch can be larger or smaller than `size`. Replayed
    trajectories follow them in proportion, so that every mini-batch has the batch's fresh:replay split within
    one trajectory; with fewer groups than mini-batches that is impossible, and they are spread evenly. Which
    go where depends on `seed` alone.
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


def cut_micro_batches(lengths: Sequence[int], max_tokens: int, *, packs: bool = False) -> list[list[int]]:
    """Positions of the rows of each pass, by length: at most `max_tokens` tokens, at least one row.

    Padding counts, unless rows are packed.
    """
    return cut_whole_trajectories(lengths, range(len(lengths)), max_tokens, packs=packs)


def cut_whole_trajectories(
    lengths: Sequence[int], trajectories: Sequence[int], max_tokens: int, *, packs: bool = False
) -> list[list[int]]:
    """Likewise, with all rows of a trajectory in one pass: at least one trajectory, however long it is."""
    rows: dict[int, list[int]] = {}
    for position, trajectory in enumerate(trajectories):
        rows.setdefault(trajectory, []).append(position)
    longest = {trajectory: max(lengths[position] for position in rows[trajectory]) for trajectory in rows}
    cuts: list[list[int]] = []
    for trajectory in sorted(rows, key=lambda trajectory: longest[trajectory]):
        whole = rows[trajectory]
        together = [*cuts[-1], *whole] if cuts else whole
        # Ascending order: the newest row is the longest, and sets the padded width.
        tokens = sum(lengths[p] for p in together) if packs else len(together) * longest[trajectory]
        if cuts and tokens <= max_tokens:
            cuts[-1] = together
        else:
            cuts.append(whole)
    return cuts
