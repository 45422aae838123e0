import pytest

from replay.diagnosis import SIGNS, trouble
from replay.pages.report import tiles

CONFIG = {"batch": {"group_size": 4}, "optimizer": {"learning_rate": 0.001}}
_LOWER = "Begin again with --set optimizer.learning_rate=0.0001: docs/reading-a-run.md."
_TOO_HIGH = f"The learning rate is probably too high. {_LOWER}"
Curves = dict[str, list[tuple[int, float]]]


def curves(*, held_out: list[float] | None = None, tasks: int = 40, fresh: int = 64, **named: list[float]) -> Curves:
    """By iteration, from 1; evaluations from 0, before training."""
    names = {"success": SIGNS[3], "flat": SIGNS[4], "ess": SIGNS[5], "fresh_kl": SIGNS[6], "replay_kl": SIGNS[7]}
    names |= {"grad_norm": SIGNS[8], "skipped": SIGNS[9]}
    found = {names[name]: [*enumerate(values, start=1)] for name, values in named.items()}
    found[SIGNS[2]] = [(iteration, float(fresh)) for iteration, _ in found.get(SIGNS[3], [])]
    evaluated = [*enumerate(held_out or [])]
    found |= {SIGNS[0]: evaluated, SIGNS[1]: [(n, float(tasks)) for n, _ in evaluated]}
    return found


@pytest.mark.parametrize(
    ("metrics", "limit", "said"),
    [
        # 15 of 40 and 0 of 40: 0.375 is 4.3 times sqrt(2 x 0.1875 x 0.8125 / 40)
        (curves(held_out=[0.375, 0.0]), "learning rate", f"success fell from 38 % to 0 %. {_TOO_HIGH}"),
        # A group of the first iteration had a success with 0.31 x 16 / (16 + 2): 0.72^32 is 0.00002 at the third.
        (curves(success=[0.31, 0.0, 0.0]), "learning rate", f"success fell from 31 % to 0 %. {_TOO_HIGH}"),
        (
            curves(success=[0.33, 0.44, 0.0], ess=[0.98, 0.99, 0.017], fresh=16),
            "learning rate",
            f"replay ESS is 0.02: hardly a replayed token fits the policy any more. {_TOO_HIGH}",
        ),
        (
            curves(success=[0.56, 0.0], ess=[1.0, 0.62], fresh_kl=[0.66], replay_kl=[2.44], fresh=16),
            "learning rate",
            f"success fell to 0 %, and updates moved the policy by 2.4 nats a token. {_TOO_HIGH}",
        ),
        (
            curves(success=[0.5] * 8, flat=[0.8] * 8),
            "equal groups",
            "80 % of the groups have no signal: all attempts at a task end alike. Less sft (sft.epochs), a higher "
            "rollout.temperature or other tasks help: docs/reading-a-run.md.",
        ),
        # Every reward is 1.
        (
            curves(success=[1.0] * 8, flat=[1.0] * 8, skipped=[2.0] * 8, held_out=[1.0, 1.0]),
            "equal rewards",
            "no update has changed the policy in 8 iterations: attempts at a task had equal rewards. Check the rewards "
            "(agentloop env check), or take tasks that are solved sometimes: docs/reading-a-run.md.",
        ),
    ],
)
def test_what_goes_badly_is_said_with_what_helps(metrics: Curves, limit: str, said: str) -> None:
    found = trouble(metrics, CONFIG)
    assert found is not None and (found.limit, found.text) == (limit, said)
    tile = next(tile for tile in tiles({"time/iteration": [(1, 1.0)], **metrics}, CONFIG) if tile.name == "limited by")
    assert (tile.words, tile.note) == (((limit, "plain"),), said)


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        # A quickstart, and a small model on few tasks: as they were measured.
        curves(
            success=[0.09, 0.14, 0.25, 0.53, 0.75, 0.88, 0.97, 1.0],
            flat=[0.5, 0.44, 0.38, 0.31, 0.5, 0.75, 0.94, 1.0],
            ess=[0.98, 0.95, 0.91, 0.92, 0.95, 0.97, 0.98, 0.98],
            held_out=[0.12, 0.98],
        ),
        curves(
            success=[0.31, 0.33, 0.58, 0.5, 0.67, 0.33, 0.42, 0.58, 0.25, 0.67],
            flat=[0.5, 0.0, 0.33, 0.0, 0.0, 1.0, 0.67, 0.67, 0.33, 0.33],
            ess=[1.0, 1.0, 0.63, 0.68, 0.99, 0.82, 0.93, 0.89, 0.87, 0.9],
            held_out=[0.325, 0.325],
            fresh=12,
        ),
        curves(success=[0.56, 0.06], fresh_kl=[0.08, 0.02], replay_kl=[0.09], fresh=16),
        # Rare successes come and go; nothing succeeded yet; few held-out tasks; a dip to half.
        curves(success=[0.0, 0.06, 0.0, 0.0, 0.03, 0.0, 0.0, 0.0], ess=[0.05] * 8),
        curves(success=[0.0] * 50, flat=[1.0] * 50, held_out=[0.0, 0.0], fresh_kl=[0.6] * 50),
        curves(success=[0.31, 0.0], fresh=16, held_out=[0.375, 0.0], tasks=16),
        curves(held_out=[0.9, 0.5], ess=[0.01]),
        # What moved it was long ago.
        curves(success=[0.9] * 9 + [0.4], ess=[0.05], fresh_kl=[0.9]),
        # Solved after one update; too few iterations to say so.
        curves(success=[1.0] * 20, flat=[1.0] * 20, skipped=[1.0] * 20, grad_norm=[0.3]),
        curves(success=[1.0] * 7, flat=[1.0] * 7, skipped=[2.0] * 7),
        # Old rows in a run that goes on succeeding.
        curves(success=[0.4, 0.5, 0.6], ess=[0.5, 0.05, 0.05]),
    ],
)
def test_nothing_is_said_of_a_run_that_goes_well_or_shows_too_little(metrics: Curves) -> None:
    whole = range(1, 1 + max((at for points in metrics.values() for at, _ in points), default=0))
    for last in whole:
        assert trouble({name: [p for p in points if p[0] <= last] for name, points in metrics.items()}, CONFIG) is None


@pytest.mark.parametrize(("iterations", "during"), [(1, "1 iteration"), (5, "5 iterations")])
def test_a_run_in_which_nothing_changed_the_policy_says_so_at_its_end(iterations: int, during: str) -> None:
    ones = [1.0] * iterations
    metrics = curves(success=ones, flat=ones, skipped=[2.0] * iterations)
    found = trouble(metrics, CONFIG, at_end=True)
    assert found is not None and found.text.startswith(f"no update has changed the policy in {during}: attempts at")
    assert trouble(metrics | curves(grad_norm=[0.3]), CONFIG, at_end=True) is None
