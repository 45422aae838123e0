"""Tables of what the pretrained model's runs took."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks._families import FAMILIES, Family
from benchmarks._replay_figures import (
    Columns,
    Result,
    costs_table,
    differences_table,
    markdown,
    mean_success,
    total,
)
from benchmarks._trained import ROOT, read

COLUMNS = (
    "fresh",
    "replayed",
    "success",
    "tokens",
    "steps",
    "cpu",
    "wall",
    "turns",
    "collect",
    "update",
    "with_signal",
)
"""Of each iteration; `cpu`, `wall`, `collect` and `update` in seconds. `turns`: replies, which tools or the environment
answer. `with_signal`: fresh rows whose advantage is not 0; updates leave the others out. The first runs of the
calculator have nothing after `wall`."""
TITLES = {
    "on_policy": "on-policy, tuned",
    "on_policy_3": "on-policy, 3 epochs",
    "replay_instead": "a quarter instead",
    "replay_on_top": "a third on top",
}
GIVEN_UP = {"on_policy": TITLES["on_policy"], "state_values": "on-policy, with state values"}
"""An arm that is no longer in the package, and what it is compared with."""
_ROWS = "rows to train on"


def results_of(family: str) -> Path:
    return ROOT / "docs" / "evidence" / f"pretrained_{family}.jsonl"


def tables(name: str) -> dict[str, str]:
    """Costs of each arm, differences from the controls seed by seed, what a run's parts took, and the tuning."""
    family, results = FAMILIES[name], read(results_of(name))
    runs, given_up, columns = runs_of(results, TITLES), runs_of(results, GIVEN_UP), shown(family)
    against = {
        control: [(arm, control) for arm in runs if arm not in ("on_policy", control)]
        for control in ("on_policy", "on_policy_3")
    }
    found = {
        name: costs_table(runs, TITLES, columns),
        **{f"{name}-against-{key}": differences_table(runs, TITLES, pairs, columns) for key, pairs in against.items()},
        f"{name}-given-up": costs_table(given_up, GIVEN_UP, columns),
        f"{name}-given-up-against": differences_table(given_up, GIVEN_UP, [("state_values", "on_policy")], columns),
        f"{name}-tuning": tuning_table(results, family),
    }
    return {**found, f"{name}-terms": terms_table(runs)} if family.ends_at_level else found


def runs_of(results: Sequence[Result], arms: Iterable[str]) -> dict[str, list[Result]]:
    """Of the arms that have any."""
    found = {arm: [each for each in results if each["arm"] == arm] for arm in arms}
    return {arm: each for arm, each in found.items() if each}


def shown(family: Family) -> Columns:
    """Other programs ran beside the calculator's runs: their seconds are no figures."""
    measures = {
        f"fresh to {100 * family.level:g} %": "fresh",
        "generated tokens": "tokens",
        **({_ROWS: "with_signal+replayed"} if family.ends_at_level else {"rows, fresh and replayed": "fresh+replayed"}),
        "steps": "steps",
    }
    successes: dict[str, Callable[[Result], float]] = {
        f"success of the first {family.first}": partial(mean_success, episodes=family.first)
    }
    if family.ends_at_level:
        return Columns({**measures, "CPU-s": "cpu"}, successes)
    return Columns(measures, {**successes, "held-out success": lambda result: float(result["held_out"])})


def terms_table(runs: Mapping[str, Sequence[Result]]) -> str:
    """What one fresh episode and one row to train on took in each arm: medians over its runs."""
    rows = []
    for arm, results in runs.items():
        episodes = [total(result, "fresh") for result in results]
        trained = [total(result, "with_signal+replayed") for result in results]
        of_episode = [_medians(results, name, episodes) for name in ("tokens", "turns", "collect")]
        rows.append([TITLES[arm], *of_episode, _medians(results, "update", trained)])
    head = [
        "arm",
        "tokens of an episode",
        "replies of it",
        "seconds to collect it",
        "seconds to train a row, all epochs",
    ]
    return markdown(head, rows)


def _medians(results: Sequence[Result], name: str, counts: Sequence[float]) -> str:
    each = [total(result, name) / count for result, count in zip(results, counts, strict=True)]
    return f"{np.median(each):.3g}"


def tuning_table(results: Sequence[Result], family: Family) -> str:
    """Settings that were tried for the control, by seed: success of the first episodes."""
    tuned = [each for each in results if each["arm"].startswith("tune_")]
    seeds = sorted({each["seed"] for each in tuned})
    rows = []
    for arm in sorted({each["arm"] for each in tuned}):
        _, epochs, rate = arm.split("_")
        found = {each["seed"]: f"{100 * mean_success(each, family.first):.1f}" for each in tuned if each["arm"] == arm}
        rows.append([epochs, rate, *(found.get(seed, "") for seed in seeds)])
    return markdown(["epochs", "learning rate", *(f"seed {seed}, %" for seed in seeds)], rows)
