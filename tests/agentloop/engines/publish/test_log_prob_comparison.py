"""What log-probs say of an engine's weights: by hand, beside float64 references, and over many noisy engines."""

import math

import numpy as np
import pytest

from agentloop.engines.publish.log_prob_comparison import Compared, Evidence, compare_log_probs


def test_share_and_its_error_are_those_worked_out_by_hand() -> None:
    # x = new - before = (3, 4, 0), engine - before = (3, 0, 1): share = 9 / 25, residuals 1.92, -1.44 and 1.
    values = ((-1.0, -1.0, 0.1, -4.0), (-6.0, -2.0, 0.2, -6.0), (-1.0, -2.0, 0.0, -2.0))
    found = compare_log_probs([Compared(token, *each) for token, each in enumerate(values, start=1)])
    assert found.difference == pytest.approx(math.sqrt((0 + 16 + 1) / 3))
    assert found.rounding == pytest.approx(math.sqrt(0.05 / 3))
    assert found.moved == pytest.approx(math.sqrt(25 / 3))
    assert found.share == pytest.approx(0.36)
    # Each token left out: leverages 9/25 and 16/25 leave residuals 1.92 / 0.64 = 3 and -1.44 / 0.36 = -4.
    assert found.error == pytest.approx(math.sqrt((3 * 3) ** 2 + (4 * 4) ** 2) / 25)


def test_residuals_of_the_same_token_are_summed_before_they_are_squared() -> None:
    # x is 1 everywhere, the share 1 - 0.4 / 4; residuals 0.1, 0.1, 0.1 of one token and -0.3 of another.
    tokens = [*[Compared(7, -1.0, -1.0, 0.0, -2.0)] * 3, Compared(8, -1.4, -1.0, 0.0, -2.0)]
    found = compare_log_probs(tokens)
    assert found.share == pytest.approx(0.9)
    # Without the others: 0.3 / (1 - 3 / 4) and -0.3 / (1 - 1 / 4).
    assert found.error == pytest.approx(math.sqrt(1.2**2 + 0.4**2) / 4)


def test_error_is_the_learners_own_rounding_where_one_token_moved_alone() -> None:
    # Its residual is 0 by construction, and says nothing.
    tokens = [Compared(1, -1.0, -3.0, 0.5, -2.0), *(Compared(2, -1.0, -1.0, 0.0, -1.0) for _ in range(9))]
    found = compare_log_probs(tokens)
    assert (found.share, found.error) == (pytest.approx(-1.0), pytest.approx(0.5))
    assert found.is_behind is False


def test_nothing_is_said_of_a_share_where_nothing_moved() -> None:
    still = [Compared(1, -1.01, -1.0, 0.01, -1.0)] * 4
    unknown = [one._replace(before=None) for one in still]
    assert compare_log_probs(still) == Evidence(4, pytest.approx(0.01), pytest.approx(0.01), moved=0.0)
    assert compare_log_probs(unknown) == Evidence(4, pytest.approx(0.01), pytest.approx(0.01))
    assert not compare_log_probs(still).is_behind and not compare_log_probs(still).differs
    assert compare_log_probs([]).differs
    for value in (math.nan, math.inf, -math.inf):
        assert compare_log_probs([*still, Compared(2, value, -1.0, 0.1, -2.0)]).differs


def noisy(random: np.random.Generator, moved: float, *, has: float) -> Evidence:
    """Of an engine that shows the share `has` of an update: 500 tokens, heavy tails, noise of 0.05 nats."""
    scale = random.lognormal(0, 0.7, 500)
    scale /= np.sqrt((scale**2).mean())
    step = moved * scale * random.standard_normal(500)
    before = -scale
    noise, own = (0.05 * scale * random.standard_normal(500) for _ in range(2))
    columns = (range(500), before + has * step + noise, before + step, own, before)
    return compare_log_probs([Compared(int(token), *map(float, one)) for token, *one in zip(*columns, strict=True)])


def test_error_is_how_much_shares_scatter() -> None:
    random = np.random.default_rng(0)
    found = [noisy(random, 0.02, has=1.0) for _ in range(400)]
    shares = np.array([one.share for one in found])
    errors = np.array([one.error for one in found])
    assert shares.mean() == pytest.approx(1, abs=0.05)
    assert 0.7 < shares.std() / np.sqrt((errors**2).mean()) < 1.05


@pytest.mark.slow
def test_right_engines_are_never_refused_and_stale_ones_are_where_an_update_can_be_seen() -> None:
    random = np.random.default_rng(1)
    refused = {}
    for moved in (0.0001, 0.005, 0.02, 0.1, 0.5):
        right = sum(noisy(random, moved, has=1.0).is_behind for _ in range(300))
        stale = sum(noisy(random, moved, has=0.0).is_behind for _ in range(300))
        refused[moved] = (right, stale)
    assert [right for right, _ in refused.values()] == [0] * 5
    assert refused[0.0001][1] == 0
    assert [refused[moved][1] for moved in (0.1, 0.5)] == [300, 300]
