import math
from dataclasses import replace

import pytest
import torch

from agentloop.learning.batch import build_batch
from tests.fakes.batch_rows import AUTHORS, row, segment

NAN = math.nan


def test_batch_has_one_padded_row_per_segment() -> None:
    a = row("a", segment("uull", [-1, -2]), segment("ul", [-3]), advantage=0.5, temperature=0.7)
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


def test_batch_leaves_out_empty_segments() -> None:
    assert build_batch([row("a", segment(""), segment("ul"))], AUTHORS).token_ids.shape == (1, 2)


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
