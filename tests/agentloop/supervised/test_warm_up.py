"""The built-in model and its warm-up: made from a seed, and trained on exactly what was demonstrated."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from agentloop.config import ModelSection, TinyModelSection, WarmUpSection
from agentloop.environments import EnvironmentFactory, load_environment
from agentloop.models.actor import Actor
from agentloop.models.loading import LoadedModel, load_model
from agentloop.models.tiny import build_tiny_model
from agentloop.rollouts.demonstrated import demonstrations
from agentloop.supervised.warm_up import WarmUpResult, demonstrated_sequences, hardest_of_last_reply, warm_up
from context import Message, TokenSequence, default_authors, loss_mask, response_mask
from context.messages import to_template
from context.parse import choose_parser
from context.strategies import Hint, Linear, Memory, Strategy

AUTHORS = default_authors()
FACTORY = load_environment("lookup_chain", {"hops": [1, 3]})
THINKING = load_environment("lookup_chain", {"hops": [2, 3], "thinking": True, "padding": 8})
LINEAR = Linear()
TINY = TinyModelSection(layers=1, hidden=64)


def corpus() -> list[str]:
    conversations = itertools.islice(demonstrations(FACTORY, seed=1), 60)
    return [message.content for _, conversation in conversations for message in conversation]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    build_tiny_model(path, TINY, corpus=corpus(), seed=7)
    return path


@pytest.fixture
def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelSection(), folder)


def trained_text(loaded: LoadedModel, tokens: TokenSequence) -> str:
    return loaded.codec.decode(tokens.token_ids[loss_mask(tokens, AUTHORS)].tolist())


def shown_by(loaded: LoadedModel, strategy: Strategy = LINEAR) -> Callable[[Sequence[Message]], list[TokenSequence]]:
    given = {"parser": choose_parser("auto", loaded.template), "tools": FACTORY.tools, "strategy": strategy}
    return partial(demonstrated_sequences, renderer=loaded.renderer(AUTHORS), **given)


def conversations() -> Iterator[tuple[Message, ...]]:
    return (conversation for _, conversation in demonstrations(FACTORY, seed=3))


def warmed(loaded: LoadedModel, **section: float) -> WarmUpResult:
    settings = WarmUpSection.model_validate({"max_updates": 3, "batch": 4, **section})
    shown = map(shown_by(loaded), conversations())
    given = {"authors": AUTHORS, "control_ids": loaded.codec.added_ids, "progress": lambda *_: None}
    return warm_up(Actor(loaded.model), shown, settings, **given)


def test_tiny_model_is_the_same_for_the_same_seed_only(folder: Path, tmp_path: Path) -> None:
    for seed in (7, 8):
        build_tiny_model(tmp_path / str(seed), TINY, corpus=corpus(), seed=seed)
    first, same, other = ((at / "model.safetensors").read_bytes() for at in (folder, tmp_path / "7", tmp_path / "8"))
    assert first == same != other
    assert (folder / "tokenizer.json").read_bytes() == (tmp_path / "7" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("factory", [FACTORY, THINKING], ids=["plain", "thinking"])
def test_demonstration_reads_as_rendered_and_trains_replies(loaded: LoadedModel, factory: EnvironmentFactory) -> None:
    for _, turns in itertools.islice(demonstrations(factory, seed=3), 5):
        (tokens,) = shown_by(loaded)(turns)
        rendered = loaded.template.render(list(map(to_template, turns)), tools=factory.tools, generation_prompt=False)
        assert loaded.codec.decode(tokens.token_ids.tolist()) + "\n" == rendered
        replies = [message for message in turns if message.role == "assistant"]
        trained = trained_text(loaded, tokens)
        assert trained.count("<|im_end|>") == len(replies) and trained.endswith(f"{replies[-1].content}<|im_end|>")
        assert trained.count("<think>") == (len(replies) if factory is THINKING else 0)
        assert "tool_response" not in trained
        assert (loss_mask(tokens, AUTHORS) == response_mask(tokens, AUTHORS)).all()


def test_demonstration_answers_the_question_for_notes_with_what_was_thought(loaded: LoadedModel) -> None:
    _, conversation = next(demonstrations(THINKING, seed=3))
    (whole,) = shown_by(loaded)(conversation)
    sequences = shown_by(loaded, Memory(len(whole) - 60, max_summary_tokens=60))(conversation)
    trained = [trained_text(loaded, t) for t in sequences]
    thoughts = [str(message.reasoning) for message in conversation if message.role == "assistant"]
    notes = next(text for text in trained if "<think>" not in text)
    assert notes.removesuffix("<|im_end|>").split(", ")[0] in thoughts
    assert "".join(trained).count("<think>") == len(thoughts)


def test_every_second_demonstration_shows_the_hint_that_the_policy_will_see(loaded: LoadedModel) -> None:
    conversations = itertools.islice(demonstrations(THINKING, seed=3, strategy=Hint()), 4)
    plain = list(itertools.islice(demonstrations(THINKING, seed=3), 4))
    for number, (_, conversation) in enumerate(conversations):
        (tokens,) = shown_by(loaded, Hint())(conversation)
        text = loaded.codec.decode(tokens.token_ids.tolist())
        assert text.count("The trail: ") == number % 2
        assert conversation[2:] == plain[number][1][2:]  # behind the system message and the question
        trained = trained_text(loaded, tokens)
        assert "The trail" not in trained


def test_hardest_of_last_reply_skips_its_first_word() -> None:
    losses = [9.0, 9.0, 0.0, 7.0, 0.5, 0.25, 0.0]
    marked = [False, True, False, True, True, True, False]
    # The last run is 7.0, 0.5, 0.25; its first token is a choice.
    assert hardest_of_last_reply(losses, marked, [False] * 7) == 0.5
    # 7.0 as the thinking's opening tag: then 0.5 is the choice.
    assert hardest_of_last_reply(losses, marked, [False] * 3 + [True] + [False] * 3) == 0.25
    assert hardest_of_last_reply([0.0, 3.0], [False, True], [False, True]) == 3.0  # a reply of one token is that


def test_warm_up_ends_some_updates_after_the_target(loaded: LoadedModel) -> None:
    # Any loss is below 1000, so the target is met by the first update.
    assert warmed(loaded, max_updates=50, loss_target=1000.0, updates_after_target=2).updates == 3


def test_warm_up_lowers_the_loss_and_does_the_same_each_time(folder: Path) -> None:
    first, second = (load_model(ModelSection(), folder) for _ in range(2))
    results = [warmed(model, max_updates=20) for model in (first, second)]
    assert results[0] == results[1]
    assert results[0].loss < warmed(load_model(ModelSection(), folder), max_updates=1).loss - 0.5
    ours, theirs = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
