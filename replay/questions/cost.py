"""The cost of a run's episodes: tokens, seconds and money, and the distributions of lengths, turns and rewards."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from replay.questions.filters.query import QueryResult
from replay.questions.runs import merged_to, metric_series
from replay.questions.summary import read_numbers, total
from replay.questions.table_series import TOKENS, WITH_TOKENS
from replay.records import COMMITTED
from replay.storage.format.schema import draws, groups, reclaimed, trajectories
from replay.storage.format.views import IS_EPISODE, WAS_EPISODE
from replay.store import ReplayStore

_rows, _left = trajectories.c, reclaimed.c
_DISTRIBUTIONS = ("num_action_tokens", "reward", "num_turns")
_FEW_REWARDS = 7
_SECONDS = ("time/warm_up", "time/iteration", "time/evaluation")


def cost(
    store: ReplayStore, run: str, *, price_hour: float | None = None, price_million: float | None = None
) -> QueryResult:
    """Return what the episodes of a run cost, in `total` and in `iterations`. A line merges `merged` iterations.

    - `generated_tokens`: sampled tokens of the episodes, evicted ones included, those that a resume undid left out.
    - `trained_tokens`: sampled tokens of the rows in updates, each as often as updates used it. None: there is no draw.
    - `seconds`: of the warm-up, iterations and evaluations. None: not logged.
    - `money`: hours x `price_hour`, the price of all machines, + millions of generated tokens x `price_million`. None:
      there is no price, or the hours are not known.

    `per_episode` and `per_success` are these numbers divided. Lines have `p10`, `p50` and `p90` of the sampled tokens,
    the turns and the rewards of their episodes; turns of evicted episodes are not known. `reward_shares` has the share
    of each reward instead, if the run has at most 7 different ones.
    """
    with store.reading() as connection:
        values, trained = _episodes(connection, run), _trained_tokens(connection, run)
    seconds: dict[int, float] = {}
    for iteration, value in chain(*metric_series(store, run, names=_SECONDS).values()):
        seconds[iteration] = seconds.get(iteration, 0.0) + value
    merged = merged_to(int(values[0].max(initial=1)))

    def line(part: npt.NDArray[np.float64], within: range | None = None) -> QueryResult:
        spent: QueryResult = {"generated_tokens": int(part[2].sum())}
        spent["trained_tokens"] = (_sum(trained, within) or 0) if trained else None
        spent["seconds"] = _sum(seconds, within)
        spent["money"] = _money(spent, price_hour, price_million)
        counts = {"episode": part.shape[1], "success": int(part[1].sum())}
        shares = {
            f"per_{name}": {key: None if value is None or not count else value / count for key, value in spent.items()}
            for name, count in counts.items()
        }
        return {"episodes": counts["episode"], "successes": counts["success"], **spent, **shares}

    rewards = np.unique(values[3])
    places = np.where(values[0] < 1, values[0], values[0] - (values[0] - 1) % merged).astype(int)
    firsts, starts = np.unique(places, return_index=True)
    lines = [
        {"iteration": first, **line(part, range(first, first + merged)), **_distributions(part, rewards)}
        for first, part in zip(firsts.tolist(), np.split(values, starts[1:], axis=1), strict=False)
    ]
    return {"run": run, "merged": merged, "total": line(values), "iterations": lines}


def _episodes(connection: sa.Connection, run: str) -> npt.NDArray[np.float64]:
    """Read iteration, success and _DISTRIBUTIONS of a run's episodes, sorted by iteration. NaN: not known."""
    stored = (_rows.iteration, sa.cast(_rows.success, sa.Integer), *(_rows[name] for name in _DISTRIBUTIONS))
    left = (groups.c.iteration, sa.cast(_left.success, sa.Integer), _left.num_action_tokens, _left.reward, sa.null())
    gone = sa.select(*left).join_from(reclaimed, groups, groups.c.id == _left.group)
    gone = gone.where(groups.c.run == run, WAS_EPISODE)
    values = read_numbers(connection, sa.select(*stored).where(_rows.run == run, IS_EPISODE), gone)
    return values[:, np.argsort(values[0], kind="stable")]


def _trained_tokens(connection: sa.Connection, run: str) -> dict[int, int]:
    """Return the sampled tokens of the rows of each update."""
    query = sa.select(draws.c.iteration, total(TOKENS)).select_from(WITH_TOKENS)
    query = query.where(draws.c.run == run, draws.c.state == COMMITTED).group_by(draws.c.iteration)
    return dict(map(tuple, connection.execute(query)))


def _sum(values: Mapping[int, float], within: range | None) -> Any:
    """Sum the values of iterations (None: of all). None: there is no value."""
    found = values.values() if within is None else [values[at] for at in within if at in values]
    return sum(found) if found else None


def _money(spent: QueryResult, price_hour: float | None, price_million: float | None) -> float | None:
    prices = {"seconds": (price_hour, 3600), "generated_tokens": (price_million, 1e6)}
    given = {name: price / unit for name, (price, unit) in prices.items() if price is not None}
    if not given or any(spent[name] is None for name in given):
        return None
    return sum(price * float(spent[name]) for name, price in given.items())


def _distributions(part: npt.NDArray[np.float64], rewards: npt.NDArray[np.float64]) -> QueryResult:
    found = {}
    for name, column in zip(_DISTRIBUTIONS, part[2:], strict=True):
        known = column[np.isfinite(column)]
        # As np.quantile does, which takes several times as long for few values.
        places = np.multiply((0.1, 0.5, 0.9), known.size - 1)
        quantiles = np.interp(places, np.arange(known.size), np.sort(known)).tolist() if known.size else (None,) * 3
        found[name] = dict(zip(("p10", "p50", "p90"), quantiles, strict=True))
    if len(rewards) <= _FEW_REWARDS:
        del found["reward"]
        found["reward_shares"] = {f"{reward:g}": float(np.mean(part[3] == reward)) for reward in rewards.tolist()}
    return found
