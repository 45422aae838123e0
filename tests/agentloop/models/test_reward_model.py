"""A Hugging Face sequence classifier as a reward: scored at the end, in any batch, by what its logits say."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from agentloop.config import ModelSection
from agentloop.config.sections.reward import RewardModelSection
from agentloop.errors import UserError
from agentloop.models.reward_model import SequenceClassifier
from agentloop.training.train import train
from context import Message
from context.messages import ToolCall
from replay.store import ReplayStore
from tests.fakes import families as fakes
from tests.fakes.runs import SilentDisplay, rows, save_qwen2, small_config

TALKS = [
    (Message("user", "hi"), Message("assistant", "a word", author="llm")),
    (Message("user", "what is the sum of 2 and 3?"), Message("assistant", "It is 5, surely.", author="llm")),
    (Message("user", "x"), Message("assistant", "y", author="llm")),
]


def saved(folder: Path, *, labels: int = 1, template: bool = True, head: bool = True) -> Path:
    torch.manual_seed(3)
    family = fakes.family("chatml")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=family.tokenizer,
        chat_template=family.template_source if template else None,
        **family.special_tokens,
    )
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_labels=labels,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        initializer_range=0.5,
    )
    (Qwen2ForSequenceClassification if head else Qwen2ForCausalLM)(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def classifier(folder: Path, **section: object) -> SequenceClassifier:
    return SequenceClassifier(
        RewardModelSection.model_validate({"path": str(folder), **section}), ModelSection(device="cpu")
    )


def one_by_one(folder: Path, talk: tuple[Message, ...], template: bool = True) -> torch.Tensor:
    """The logits of one conversation without padding, by transformers alone."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    rows = [{"role": m.role, "content": m.content} for m in talk]
    text = "\n".join(f"{m.role}: {m.content}" for m in talk)
    if template:
        text = tokenizer.apply_chat_template(rows, tokenize=False)
    ids = torch.tensor([tokenizer(text, add_special_tokens=not template)["input_ids"]])
    model = Qwen2ForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(ids).logits[0]


@pytest.mark.parametrize("template", [True, False])
def test_score_is_the_logit_at_the_end_or_the_probability_of_a_label(tmp_path: Path, template: bool) -> None:
    folder = saved(tmp_path, template=template)
    expected = [float(one_by_one(folder, talk, template)[0]) for talk in TALKS]
    assert len(set(expected)) == 3
    for batch in (1, 2, 8):
        assert classifier(folder, batch=batch).score(TALKS) == pytest.approx(expected, abs=1e-5)
    folder = saved(tmp_path, labels=3, template=template)
    expected = [float(one_by_one(folder, talk, template).softmax(0)[2]) for talk in TALKS]
    assert classifier(folder, label=2).score(TALKS) == pytest.approx(expected, abs=1e-6)


def test_long_conversation_loses_its_beginning(tmp_path: Path) -> None:
    model = classifier(saved(tmp_path), max_tokens=12)
    end = Message("assistant", "and so it ended, as it had to end", author="llm")
    assert model.score([(Message("user", "one"), end)]) == model.score([(Message("user", "two" * 40), end)])


def test_model_without_a_template_reads_reasoning_and_tool_calls(tmp_path: Path) -> None:
    def talk(argument: int, thought: str) -> tuple[Message, ...]:
        call = ToolCall("add", {"a": argument, "b": "é"})
        return (
            Message("user", "sum?", note="two left"),
            Message("assistant", "", author="llm", tool_calls=(call,), reasoning=thought),
            Message("tool", "5", author="env", name="add"),
            Message("assistant", "It is 5.", author="llm"),
        )

    model = classifier(saved(tmp_path, template=False))
    assert model._text(talk(2, "I need a tool.")) == (
        "user: sum?\n\ntwo left\nassistant (reasoning): I need a tool.\n"
        'assistant calls add: {"a": 2, "b": "é"}\ntool (add): 5\nassistant: It is 5.'
    )
    first, other_call, other_thought = model.score([talk(2, "so"), talk(7, "so"), talk(2, "hm")])
    assert len({round(score, 5) for score in (first, other_call, other_thought)}) == 3


def test_more_tokens_than_the_model_has_positions_are_refused(tmp_path: Path) -> None:
    """Rotary ones, and RoBERTa's 34, of which those up to padding's, 0 and 1, stand for no token."""
    rotary, roberta = saved(tmp_path / "rotary"), saved(tmp_path / "roberta")
    size = len(PreTrainedTokenizerFast.from_pretrained(roberta))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    places = {"max_position_embeddings": 34, "type_vocab_size": 1, "num_labels": 1, "pad_token_id": 1}
    RobertaForSequenceClassification(RobertaConfig(vocab_size=size, **places, **sizes)).save_pretrained(roberta)
    for folder, most in ((rotary, 32768), (roberta, 32)):
        assert len(classifier(folder, max_tokens=most).score(TALKS)) == 3
        said = rf"^reward\.model\.max_tokens must be at most {most}, .*, got {most + 1}\. Lower it"
        with pytest.raises(UserError, match=said):
            classifier(folder, max_tokens=most + 1)


@pytest.mark.parametrize(
    ("made", "label", "said"),
    [
        ({"labels": 1}, 0, "reward.model.label must be null for a model with one output"),
        ({"labels": 3}, None, "reward.model.label must be null"),
        ({"labels": 3}, 3, "got 3 with 3 outputs"),
        ({"head": False}, None, "must hold a trained classification head"),
        (None, None, r"reward.model.path must be a folder or hub id of a sequence classifier"),
    ],
)
def test_model_that_can_not_score_is_refused(
    tmp_path: Path, made: dict[str, Any] | None, label: int | None, said: str
) -> None:
    folder = tmp_path if made is None else saved(tmp_path, **made)
    with pytest.raises(UserError, match=said):
        classifier(folder, label=label)


@pytest.mark.slow
def test_run_stores_what_the_model_says_of_each_whole_episode(tmp_path: Path) -> None:
    judge = saved(tmp_path / "judge")
    config = small_config(
        tmp_path,
        save_qwen2(tmp_path / "policy"),
        run={"iterations": 1},
        rollout={"max_turns": 1, "max_tokens_per_turn": 12},
        reward={"environment": 0.0, "model": {"path": str(judge), "weight": 2.0}},
        evaluation={"every": 0, "tasks": 1},
    )
    display = SilentDisplay()
    result = train(config, display=display)
    ids = [id for (id,) in rows(result.folder / "replay.sqlite", "select id from trajectories order by slot")]
    with closing(ReplayStore.open(result.folder / "replay.sqlite", read_only=True)) as store:
        stored = store.read(ids)
    scores = classifier(judge).score([trajectory.messages for trajectory in stored])
    assert [trajectory.record.reward for trajectory in stored] == pytest.approx([2 * s for s in scores], abs=1e-5)
    assert len({round(score, 4) for score in scores}) > 8
    assert display.iterations[0]["reward/model"] == pytest.approx(sum(scores) / 16, abs=1e-5)
    assert display.iterations[0]["rollout/success"] == display.iterations[0]["reward/environment"]


def test_weights_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    (saved(tmp_path / "model") / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a.bin"}}')
    with pytest.raises(UserError, match=r"^reward\.model\.path must have its weights in \.safetensors .*'\.\./a\.bin'"):
        classifier(tmp_path / "model")
