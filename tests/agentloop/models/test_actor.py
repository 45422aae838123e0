import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from agentloop.errors import UserError
from agentloop.models.loading import check_positions
from tests.fakes.batch_rows import VOCABULARY
from tests.fakes.tiny_actors import tiny_actor

IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 0, 0]])
ATTENTION = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], dtype=torch.bool)
RESPONSE = torch.tensor([[0, 0, 1, 0, 1, 1], [0, 1, 0, 1, 0, 0]], dtype=torch.bool)
TEMPERATURE = torch.tensor([1.0, 0.5])


def test_log_probs_and_entropies_equal_those_of_the_whole_logits() -> None:
    actor = tiny_actor()
    log_probs, entropies = actor.log_probs(IDS, ATTENTION, RESPONSE, TEMPERATURE)
    for row, temperature in enumerate([1.0, 0.5]):
        logits = actor.model(input_ids=IDS[row : row + 1, : int(ATTENTION[row].sum())]).logits[0]
        probabilities = torch.softmax(logits / temperature, dim=-1)
        for t in range(6):
            if RESPONSE[row, t]:
                p = probabilities[t - 1]
                assert log_probs[row, t].item() == pytest.approx(p[IDS[row, t]].log().item(), abs=1e-12)
                assert entropies[row, t].item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-12)
            else:
                assert log_probs[row, t].item() == entropies[row, t].item() == 0.0


def test_log_probs_ignore_what_stands_in_the_padding() -> None:
    actor = tiny_actor()
    other = IDS.clone()
    other[~ATTENTION] = VOCABULARY - 1
    left, right = (actor.log_probs(ids, ATTENTION, RESPONSE, TEMPERATURE)[0] for ids in (IDS, other))
    assert torch.equal(left, right)


def test_entropies_that_were_not_asked_for_are_unknown() -> None:
    _, entropies = tiny_actor().log_probs(IDS, ATTENTION, RESPONSE, TEMPERATURE, entropy=False)
    assert bool(entropies[RESPONSE].isnan().all())
    assert not entropies[~RESPONSE].any()


def test_left_padding_is_refused() -> None:
    with pytest.raises(ValueError, match="attention_mask must be padded on the right"):
        tiny_actor().log_probs(IDS, ATTENTION.flip(1), RESPONSE & False, TEMPERATURE)


def test_dropout_is_off_even_if_the_model_was_left_in_training_mode() -> None:
    actor = tiny_actor(attention_dropout=0.5)
    actor.model.train()
    first, second = (actor.log_probs(IDS, ATTENTION, RESPONSE, TEMPERATURE)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "dtype, expected", [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)]
)
def test_log_probs_are_float32_or_better(dtype: torch.dtype, expected: torch.dtype) -> None:
    actor = tiny_actor(dtype)
    for mask in (RESPONSE, RESPONSE & False):
        log_probs, entropies = actor.log_probs(IDS, ATTENTION, mask, TEMPERATURE)
        assert log_probs.dtype == entropies.dtype == actor.dtype == expected
        assert log_probs.shape == IDS.shape and bool(log_probs.any()) == bool(mask.any()) == bool(entropies.any())


def test_more_tokens_than_a_model_has_positions_are_refused_or_noted_where_they_are_rotary() -> None:
    rotary = tiny_actor().model
    most = rotary.config.max_position_embeddings
    assert check_positions(rotary, most) is None
    assert f"{most + 1:,} is beyond the {most:,} positions of Qwen" in str(check_positions(rotary, most + 1))
    learned = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=16, n_embd=4, n_layer=1, n_head=1))
    assert check_positions(learned, 16) is None
    with pytest.raises(UserError, match=r"^context\.max_tokens must be at most 16, its positions, got 17"):
        check_positions(learned, 17)
