import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentloop.learning.batch import build_batch, cut_micro_batches, plan_mini_batches
from agentloop.learning.passes import reusable_rows
from tests.fakes.batch_rows import AUTHORS, row, segment

NAN = math.nan


def test_batch_has_one_padded_row_per_segment_with_tokens() -> None:
    a = row("a", segment("uull", [-1, -2]), segment(""), segment("ul", [-3]), advantage=0.5, temperature=0.7)
    b = row("b", segment("uldel", [-4, -5, -6]), advantage=-1.0, stream="replay")
    batch = build_batch([a, b], AUTHORS)

    assert batch.trajectory_ids == ("a", "b")
    assert batch.trajectory.tolist() == [0, 0, 1]
    assert batch.replay_mask.tolist() == [False, False, True]
    assert batch.temperature.tolist() == pytest.approx([0.7, 0.7, 1.0])
    assert batch.lengths == [4, 2, 5]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert batch.response_mask.int().tolist() == [[0, 0, 1, 1, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 1]]
    assert batch.loss_mask.int().tolist() == [[0, 0, 1, 1, 0], [0, 1, 0, 0, 0], [0, 1, 0, 0, 1]]
    assert batch.advantages.tolist() == [[0, 0, 0.5, 0.5, 0], [0, 0.5, 0, 0, 0], [0, -1, 0, 0, -1]]
    expected = torch.tensor([[NAN, NAN, -1, -2, NAN], [NAN, -3, NAN, NAN, NAN], [NAN, -4, -5, NAN, -6]])
    torch.testing.assert_close(batch.behavior_log_probs, expected, rtol=0, atol=0, equal_nan=True)
    assert batch.token_ids[0, :4].tolist() == a.trajectory.segments[0].tokens.token_ids.tolist()
    assert batch.token_ids[1].tolist()[2:] == [0, 0, 0]
    assert batch.token_ids.dtype == batch.trajectory.dtype == torch.int64
    assert batch.replayed.tolist() == [False, True]


def test_batch_rows_are_cut_to_the_longest_and_keep_their_trajectory() -> None:
    batch = build_batch([row("a", segment("uull")), row("b", segment("ul")), row("c", segment("uullll"))], AUTHORS)
    part = batch.select(torch.tensor([1, 0]))
    assert part.token_ids.shape == (2, 4)
    assert part.trajectory.tolist() == [1, 0]
    assert part.token_ids[1].tolist() == batch.token_ids[0, :4].tolist()
    assert batch.select(torch.tensor([], dtype=torch.int64)).token_ids.shape == (0, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "rows must hold at least one trajectory"),
        ([row("a", segment("ul")), row("a", segment("ul"))], "trajectory a must occur once"),
        ([row("a", segment(""))], "trajectory a must have at least one token"),
        ([row("a", segment("ul"), temperature=0.0)], "temperature must be > 0"),
        ([row("a", segment("ul"), advantage=NAN)], "advantage must be finite"),
    ],
)
def test_batch_refuses_rows_it_cannot_learn_from(rows: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_batch(rows, AUTHORS)  # type: ignore[arg-type]


def test_batch_checks_that_loss_is_within_response_within_attention() -> None:
    batch = build_batch([row("a", segment("ul")), row("b", segment("ulll"))], AUTHORS)
    everything = torch.ones_like(batch.loss_mask)
    with pytest.raises(ValueError, match="loss_mask must be within response_mask"):
        replace(batch, loss_mask=everything)
    with pytest.raises(ValueError, match="response_mask must be within attention_mask"):
        replace(batch, response_mask=everything)


sizes = st.lists(st.integers(1, 9), max_size=12)


def grouped(group_sizes: list[int], replayed: int) -> list[str | None]:
    return [f"g{i}" for i, size in enumerate(group_sizes) for _ in range(size)] + [None] * replayed


def test_mini_batches_follow_the_seed_alone_and_are_even_where_groups_can_be() -> None:
    groups = grouped([4] * 8, 8)
    first = plan_mini_batches(groups, 10, seed=(0, 1, 0))
    assert first == plan_mini_batches(groups, 10, seed=(0, 1, 0))
    assert all(first != plan_mini_batches(groups, 10, seed=seed) for seed in [(1, 1, 0), (0, 2, 0), (0, 1, 1)])
    for seed in range(9):
        assert [*map(len, plan_mini_batches(grouped([1, 1, 1, 1, 4], 0), 4, seed=(seed, 1, 0)))] == [4, 4]


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_micro_batches_cover_all_rows_once_within_the_token_limit(lengths: list[int], limit: int) -> None:
    cuts = cut_micro_batches(lengths, limit)
    assert sorted(position for cut in cuts for position in cut) == list(range(len(lengths)))
    for cut in cuts:
        assert len(cut) == 1 or len(cut) * max(lengths[p] for p in cut) <= limit


def test_micro_batches_put_rows_of_like_length_together_and_packed_ones_as_they_come_without_padding() -> None:
    assert cut_micro_batches([9, 2, 8, 3], 18) == [[1, 3], [2, 0]]
    assert cut_micro_batches([5, 5], 1) == [[0], [1]]
    assert cut_micro_batches([9, 2, 8, 3], 11, packs=True) == [[0, 1], [2, 3]]


@given(sizes, st.integers(0, 40), st.integers(1, 30), st.integers(0, 99))
def test_mini_batches_hold_whole_groups_and_shares(group_sizes: list[int], replayed: int, size: int, seed: int) -> None:
    groups = grouped(group_sizes, replayed)
    bins = plan_mini_batches(groups, size, seed=(seed, 1, 0))
    assert len(bins) == -(-len(groups) // size)
    assert sorted(position for members in bins for position in members) == list(range(len(groups)))
    homes = {(groups[position], number) for number, members in enumerate(bins) for position in members}
    assert len([group for group, _ in homes if group is not None]) == len(group_sizes)
    fresh_counts = [sum(groups[p] is not None for p in members) for members in bins]
    if bins and group_sizes:
        assert max(fresh_counts) - min(fresh_counts) <= max(group_sizes)
    for members, fresh in zip(bins, fresh_counts, strict=True):
        share = len(members) * replayed / len(groups) if all(fresh_counts) else replayed / len(bins)
        assert abs(len(members) - fresh - share) <= 1


def test_stored_log_probs_are_reused_of_rows_that_have_all_of_them() -> None:
    """A message by an author of one's own was sampled by nobody: the weights must score such a row."""
    rows = [row("whole", segment("uull")), row("partly", segment("uull", [-1.0, math.nan])), row("old", segment("ull"))]
    flags = [replace(each, scored=number < 2) for number, each in enumerate(rows)]
    assert reusable_rows(build_batch(flags, AUTHORS)).tolist() == [True, False, False]
