"""Bins of ratios and drift: where a value falls, what quantiles can be told, and how they are kept."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from replay import InvalidRecord, ReplayStore
from replay.records import Histogram
from replay.sampling.samplers import make_sampler
from replay.storage.format.encoding import BlobError
from replay.storage.format.ratio_histograms import (
    BINS,
    EDGES,
    Scale,
    bounds,
    count,
    decode,
    encode,
    merged,
    quantile,
    quantile_bounds,
    scale_for,
)
from tests.fakes.records import RUN, iterate, iteration_record, sql

MIDDLE = 47
"""46 narrower and wider bins and the outermost one stand below the bin around 0."""


def test_bins_are_symmetric_and_each_width_begins_where_the_narrower_one_ends() -> None:
    assert BINS == 1 + 2 * (12 + 20 + 8 + 6) + 2 == 95
    assert list(EDGES) == [-edge for edge in reversed(EDGES)]
    widths = np.diff(np.concatenate([[0.0], [edge for edge in EDGES if edge > 0]]))
    assert widths == pytest.approx([0.005, *[0.01] * 12, *[0.05] * 20, *[0.25] * 8, *[1.25] * 6])
    assert [edge for edge in EDGES if edge in (0.125, 1.125, 3.125, 10.625)] == [0.125, 1.125, 3.125, 10.625]


@pytest.mark.parametrize(
    ("log", "place"),
    [
        (0.0, MIDDLE),
        (-0.005, MIDDLE),  # the lower edge belongs to the bin
        (np.nextafter(-0.005, -1), MIDDLE - 1),
        (0.005, MIDDLE + 1),  # the upper one does not
        (np.nextafter(0.005, 0), MIDDLE),
        (0.115, MIDDLE + 12),
        (0.125, MIDDLE + 13),  # the first of width 0.05
        (1.125, MIDDLE + 33),  # of 0.25: after 12 and 20 narrower ones
        (-1.125, MIDDLE - 32),
        (np.nextafter(10.625, 0), MIDDLE + 46),
        (10.625, BINS - 1),
        (20.0, BINS - 1),
        (np.nextafter(-10.625, -20), 0),
        (-10.625, 1),
    ],
)
def test_a_log_falls_into_the_bin_that_holds_its_lower_edge(log: float, place: int) -> None:
    counts = count(np.float64([log]))
    assert counts.nonzero()[0].tolist() == [place]
    lower, upper = bounds(place)
    assert lower <= log < upper


def test_unknown_logs_are_in_no_bin() -> None:
    assert count([math.nan, 0.0, math.nan]).sum() == 1
    assert count([]).sum() == 0


def test_quantiles_are_told_as_what_their_bins_hold_them_between() -> None:
    # Of 4 tokens with ratios 1, 1, e^0.3 and e^2 the one of rank ceil(0.5 x 4) = 2 is 1; rank 3 is e^0.3.
    counts = merged([count([0.0, 0.3]), count([0.0, 2.0])])
    assert quantile_bounds(counts, 0.5) == pytest.approx((math.exp(-0.005), math.exp(0.005)))
    assert quantile_bounds(counts, 0.51) == pytest.approx((math.exp(0.275), math.exp(0.325)))
    assert quantile_bounds(counts, 0.99) == pytest.approx((math.exp(1.875), math.exp(2.125)))
    assert quantile(counts, 0.51) == pytest.approx(math.exp(0.3))
    assert quantile_bounds(count([30.0]), 0.5) == (pytest.approx(math.exp(10.625)), math.inf)
    assert quantile_bounds(count([-30.0]), 0.5) == (0.0, pytest.approx(math.exp(-10.625)))
    assert quantile(count([-30.0]), 0.5) == pytest.approx(math.exp(-10.625))
    assert (quantile_bounds(count([]), 0.5), quantile(count([]), 0.5)) == (None, None)


def test_scale_is_narrow_near_one_and_wide_for_what_has_drifted() -> None:
    near, far = count(np.linspace(-0.05, 0.05, 1001)), count(np.linspace(-2, 2, 1001))
    assert scale_for([near]) == Scale(width=2, half=6)  # 13 bins of 0.01
    # 98 % of what is even between -2 and 2 is within 1.96, so between the edges -2.125 and 2.125 of 17 bins of 0.25.
    assert scale_for([near, far]) == Scale(width=50, half=8)
    assert scale_for([]) == Scale(width=2, half=6)
    assert scale_for([count([30.0])]) == Scale(width=250, half=8)
    for scale in (Scale(2, 6), Scale(10, 22), Scale(50, 8), Scale(250, 8)):
        assert set(np.round(scale.edges, 9)) <= set(np.round(EDGES, 9))
        for counts in (near, far):
            drawn = scale.of(counts)
            assert (len(drawn), drawn.sum()) == (len(scale.edges) + 1, 1001)
    assert Scale(50, 8).of(count([0.124, -0.126, -5.0, 2.125])).nonzero()[0].tolist() == [0, 8, 9, 18]


def test_counts_come_back_as_they_were_and_nothing_else_does() -> None:
    counts = count(np.random.default_rng(0).normal(0, 0.3, 5000))
    blob = encode(counts)
    assert blob[:8] == b"AL\x06\x01" + bytes([BINS, 0, 0, 0])
    assert np.array_equal(decode(blob), counts)
    assert len(blob) < 8 * BINS / 2
    with pytest.raises(BlobError):
        decode(blob[:-3])
    for wrong in (counts[1:], counts - 10_000, counts.astype(np.float64)):
        with pytest.raises(ValueError, match="95 whole numbers >= 0"):
            encode(wrong)


def kept(store: ReplayStore) -> list[tuple[int, str]]:
    return sql(store, "select iteration, quantity from histograms order by 1, 2")


def test_histograms_are_committed_with_their_draws_and_rolled_back_with_them(store: ReplayStore) -> None:
    sampler = make_sampler("uniform", 0)
    spread = [Histogram("drift", "fresh", "", count([0.0, 0.1])), Histogram("ratio", "replay", "2-3", count([1.0]))]
    for iteration in (1, 2, 3):
        iterate(store, iteration, sampler, histograms=spread)
    assert kept(store) == [(n, name) for n in (1, 2, 3) for name in ("drift", "ratio")]
    ((blob,),) = sql(store, "select counts from histograms where iteration = 2 and quantity = 'drift'")
    assert np.array_equal(decode(bytes(blob)), spread[0].counts)
    store.resume(RUN, 2)
    assert kept(store) == [(n, name) for n in (1, 2) for name in ("drift", "ratio")]


def test_an_iteration_with_a_wrong_histogram_is_not_stored(store: ReplayStore) -> None:
    wrong = Histogram("drift", "fresh", "", np.zeros(3, np.int64))
    with pytest.raises(InvalidRecord, match=r"histograms\[0\].counts must be 95 whole numbers >= 0"):
        store.commit(replace(iteration_record(1, replay=0), histograms=[wrong]), [], sampler_state={})
    assert sql(store, "select count(*) from iterations") == [(0,)]
