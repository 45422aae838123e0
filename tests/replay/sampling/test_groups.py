from __future__ import annotations

import numpy as np

from replay.sampling.groups import whole_groups

# Rows 0 to 7 of groups 5, 7, 5, 9, 7, 9, 9 and 8; group 8 had two members.
COLUMNS = {"group": np.array([5, 7, 5, 9, 7, 9, 9, 8]), "group_size": np.array([2, 2, 2, 3, 2, 3, 3, 2])}


def test_groups_are_whole_if_every_member_is_there() -> None:
    found = whole_groups(np.arange(8), COLUMNS)
    assert [found.members(at).tolist() for at in range(len(found))] == [[0, 2], [1, 4], [3, 5, 6]]
    assert found.first.tolist() == [0, 1, 3]
    without = whole_groups(np.array([1, 2, 3, 4, 5, 6]), COLUMNS)
    assert [without.members(at).tolist() for at in range(len(without))] == [[1, 4], [3, 5, 6]]
    assert len(whole_groups(np.array([], np.intp), COLUMNS)) == 0


def test_means_are_over_the_members_of_each_group() -> None:
    found = whole_groups(np.arange(8), COLUMNS)
    values = np.array([1.0, 10.0, 3.0, 0.0, 20.0, 6.0, 3.0, 99.0])
    assert found.means(values).tolist() == [2.0, 15.0, 3.0]
    assert found.only(np.array([True, False, True])).means(values).tolist() == [2.0, 3.0]
