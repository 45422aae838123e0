from hypothesis import given
from hypothesis import strategies as st

from agentloop.learning.batch import cut_micro_batches, plan_mini_batches

sizes = st.lists(st.integers(1, 9), max_size=12)


def rows(group_sizes: list[int], replayed: int) -> list[str | None]:
    return [f"g{i}" for i, size in enumerate(group_sizes) for _ in range(size)] + [None] * replayed


def test_mini_batches_follow_the_seed_alone() -> None:
    groups = rows([4] * 8, 8)
    first = plan_mini_batches(groups, 10, seed=(0, 1, 0))
    assert first == plan_mini_batches(groups, 10, seed=(0, 1, 0))
    assert all(first != plan_mini_batches(groups, 10, seed=seed) for seed in [(1, 1, 0), (0, 2, 0), (0, 1, 1)])


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_micro_batches_cover_all_rows_once_within_the_token_limit(lengths: list[int], limit: int) -> None:
    cuts = cut_micro_batches(lengths, limit)
    assert sorted(position for cut in cuts for position in cut) == list(range(len(lengths)))
    for cut in cuts:
        assert len(cut) == 1 or len(cut) * max(lengths[p] for p in cut) <= limit


def test_micro_batches_put_rows_of_like_length_together() -> None:
    assert cut_micro_batches([9, 2, 8, 3], 18) == [[1, 3], [2, 0]]
    assert cut_micro_batches([5, 5], 1) == [[0], [1]]


def test_packed_rows_share_passes_as_they_come_and_without_padding() -> None:
    assert cut_micro_batches([9, 2, 8, 3], 11, packs=True) == [[0, 1], [2, 3]]


@given(sizes, st.integers(0, 40), st.integers(1, 30), st.integers(0, 99))
def test_mini_batches_hold_every_row_once_whole_groups_and_the_split_of_the_batch(
    group_sizes: list[int], replayed: int, size: int, seed: int
) -> None:
    groups = rows(group_sizes, replayed)
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
