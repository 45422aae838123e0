"""Groups that tell nothing are given a stored member that makes them tell something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from replay.request import Pick


def with_completions(
    picks: Sequence[Pick], flat: Sequence[tuple[str, float]], stored: Mapping[tuple[str, float], int]
) -> tuple[Pick, ...]:
    """`picks`, of as many rows, begun by one row for each group of equal rewards that the buffer can complete.

    `flat` has the task and the reward of each such group, `stored` the rows by task and reward. A row comes out of a
    pick of its own task, or of one of any task, the largest first: how much is replayed does not change.
    """
    left = list(picks)
    taken = Counter[str]()
    first: list[Pick] = []
    for task, reward in flat:
        others = sum(count for (of, got), count in stored.items() if of == task and got != reward)
        givers = [i for i, pick in enumerate(left) if pick.count and pick.task in (task, None)]
        if not givers or others <= taken[task]:
            continue
        giver = max(givers, key=lambda i: (left[i].task == task, left[i].count))
        taken[task] += 1
        first.append(replace(left[giver], count=1, task=task, reward_other_than=reward))
        left[giver] = replace(left[giver], count=left[giver].count - 1)
    return (*first, *(pick for pick in left if pick.count))
