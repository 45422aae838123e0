"""`agentloop sft`: what is trained, that it is learned, and that stopping changes nothing."""

import json
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentloop.analysis.stored_policies import evaluate_run, newest_trained_folder
from agentloop.config import ModelSection, RunConfig, TinyModelSection
from agentloop.errors import TrainingStopped, UserError
from agentloop.models.actor import Actor
from agentloop.models.loading import LoadedModel, load_model
from agentloop.runs.run_folder import config_to_resume, open_run_folder
from agentloop.supervised.demonstrations import compare_with_environment, read_demonstrations
from agentloop.supervised.sft import SftResult, batch_of_update, sft
from agentloop.supervised.supervised_update import learn
from context import loss_mask
from context.tokens.token_sequence import TokenSequence
from replay.errors import ReplayError
from replay.locate import newest_run_folder
from replay.pages.app import create_folder_app
from replay.pages.views.runs_page import OpenedRuns
from tests.agentloop.supervised.test_warm_up import trained_text
from tests.fakes.batch_rows import AUTHORS, segment
from tests.fakes.processes import assert_same_bits
from tests.fakes.refusals import refusal_of
from tests.fakes.runs import ROOT, SilentDisplay, small_config
from tests.fakes.tiny_actors import tiny_actor
from tests.replay.pages.serving import charts_of, served

DEMONSTRATIONS = ROOT / "examples/demonstrations.jsonl"
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": '{"key": "a"}'}}


@pytest.fixture(scope="module")
def loaded(qwen2: Path) -> LoadedModel:
    return load_model(ModelSection(), qwen2)


def conversation(number: int, **of_reply: Any) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"Question {number}"},
            {"role": "assistant", "content": "", "tool_calls": [CALL], **of_reply},
            {"role": "tool", "tool_call_id": "call00001", "content": f"found {number}"},
            {"role": "assistant", "content": f"It is {number % 3}."},
        ]
    }


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def configured(folder: Path, model: Path, data: Path, /, **sections: Any) -> RunConfig:
    section = {"data": str(data), "epochs": 4, "batch": 4, "learning_rate": 3e-3, "warmup_updates": 2, "every": 6}
    environment = sections.pop("environment", {"name": "lookup_chain"})
    return small_config(folder, model, environment=environment, sft={**section, **sections.pop("sft", {})}, **sections)


# What is trained


def read(loaded: LoadedModel, path: Path, **sections: Any) -> list[TokenSequence]:
    config = RunConfig.model_validate({"context": {"max_tokens": 2000}, **sections})
    found = read_demonstrations(path, config, loaded, key="sft.data")
    return [tokens for row in found.read for tokens in row.sequences]


def test_strategy_shows_demonstrations_as_the_policy_will_see_them(loaded: LoadedModel, tmp_path: Path) -> None:
    long = conversation(7)
    long["messages"][1:1] = 4 * long["messages"][1:3]
    path = written(tmp_path / "a.jsonl", [long])
    (whole,) = read(loaded, path)
    call = '<tool_call>\n{"name": "look", "arguments": {"key": "a"}}\n</tool_call><|im_end|>'
    assert trained_text(loaded, whole) == f"{5 * call}It is 1.<|im_end|>"
    assert np.isnan(whole.behavior_log_probs).all()
    window = {"strategy": "sliding_window", "options": {"budget": len(whole) - 60}}
    sequences = read(loaded, path, context={"max_tokens": 2000, **window})
    assert len(sequences) > 1
    assert "".join(trained_text(loaded, tokens) for tokens in sequences) == trained_text(loaded, whole)
    with pytest.raises(UserError, match=r":1: context\.strategy must ask the policy no questions.*got Memory"):
        asking = {"budget": len(whole) - 60, "max_summary_tokens": 60}
        read(loaded, path, context={"max_tokens": 2000, "strategy": "memory", "options": asking})


def test_order_within_an_epoch_comes_from_the_seed() -> None:
    def epoch(number: int, seed: int) -> list[int]:
        updates = range(5 * number + 1, 5 * number + 6)
        return [row for update in updates for row in batch_of_update(range(19), update, size=4, seed=seed)]

    first = epoch(0, seed=7)
    assert sorted(first) == list(range(19))
    assert first == epoch(0, seed=7)
    assert first not in (epoch(1, seed=7), epoch(0, seed=8), list(range(19)))


# The loss


def rows_of_tokens() -> list[TokenSequence]:
    return [segment(text, seed=i).tokens for i, text in enumerate(("uuxxex", "uxuuuuuuxxxx", "ux", "uddxeexxx"))]


def test_loss_is_the_mean_cross_entropy_of_trained_tokens() -> None:
    actor, rows = tiny_actor(torch.float64), rows_of_tokens()
    total, count = 0.0, 0
    for row in rows:
        logits = actor.model(input_ids=torch.tensor([row.token_ids.tolist()])).logits[0].detach().numpy()
        for place in np.flatnonzero(loss_mask(row, AUTHORS)):
            scores = logits[place - 1]
            total += np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[row.token_ids[place]]
            count += 1
    # xx.x, x + xxxx, x, and (after two of an author that is not trained) x.xxx
    assert count == 3 + 5 + 1 + 4
    found = learn(actor, rows, AUTHORS, max_tokens=1000)
    assert found.tokens == count
    assert found.loss == pytest.approx(total / count, rel=1e-12)


def test_gradient_does_not_depend_on_the_passes_and_measuring_leaves_none() -> None:
    gradients = []
    for max_tokens, packs in ((1000, False), (12, False), (1, False), (1000, True), (12, True)):
        actor = Actor(tiny_actor(torch.float64).model, packs=packs)
        learn(actor, rows_of_tokens(), AUTHORS, max_tokens=max_tokens)
        gradients.append(torch.cat([p.grad.flatten() for p in actor.model.parameters() if p.grad is not None]))
    limit = 1e-10 * float(gradients[0].abs().max())
    assert all(float((other - gradients[0]).abs().max()) <= limit for other in gradients[1:])
    actor = tiny_actor(torch.float64)
    with torch.no_grad():
        learn(actor, rows_of_tokens(), AUTHORS, max_tokens=12)
    assert all(p.grad is None for p in actor.model.parameters())


# Runs


class _StopAt(SilentDisplay):
    def __init__(self, update: int) -> None:
        super().__init__()
        self._update = update

    def phase(self, name: str, done: int, total: int, tokens: object = None) -> None:
        if name == "sft" and done == self._update:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("data") / "mine.jsonl", [conversation(number) for number in range(24)])


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, qwen2: Path, data: Path) -> tuple[SftResult, SilentDisplay]:
    display = SilentDisplay()
    return sft(configured(tmp_path_factory.mktemp("unbroken"), qwen2, data), display=display), display


def logged(result: SftResult) -> list[dict[str, float]]:
    return [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]


def test_sft_lowers_loss_and_leaves_a_model(unbroken: tuple[SftResult, SilentDisplay], loaded: LoadedModel) -> None:
    result, display = unbroken
    assert result.conversations + result.held_out == 24
    assert result.updates == 4 * -(-result.conversations // 4)
    assert result.held_out_after < result.held_out_before - 1.5  # of ln(392) = 6 nats at first
    trained = load_model(ModelSection(), result.model)
    assert trained.template.hash == loaded.template.hash
    assert trained.codec.hash == loaded.codec.hash
    told = [note for note in display.notes if note.startswith("update ")]
    assert told[0] == f"update 0/{result.updates}  held-out loss {result.held_out_before:.4f}"
    assert told[-1].endswith(f"held-out loss {result.held_out_after:.4f}")
    assert told[1] == f"update 1/{result.updates}  loss {logged(result)[1]['sft/loss']:.4f}"
    rows = logged(result)
    assert [row["iteration"] for row in rows] == list(range(result.updates + 1))
    # 3e-3 x 1/3 and x 2/3, then the peak, and a tenth of it at the last update.
    assert [row["sft/learning_rate"] for row in rows[1:4]] == [pytest.approx(rate) for rate in (1e-3, 2e-3, 3e-3)]
    assert rows[-1]["sft/learning_rate"] == pytest.approx(3e-4)
    assert rows[-1]["sft/epoch"] == 4.0
    found = evaluate_run(newest_trained_folder(result.folder.parent))
    assert found.evaluation.tasks == 8
    assert (found.evaluated.run, found.evaluated.policy_version) == (str(result.folder), None)


def test_inspector_lists_a_run_of_sft_and_shows_its_losses_and_what_it_was_trained_from(
    unbroken: tuple[SftResult, SilentDisplay], data: Path, qwen2: Path
) -> None:
    result, _ = unbroken
    path = f"/in/{result.folder.name}/runs/{open_run_folder(result.folder).run_id}"
    with closing(OpenedRuns(result.folder.parent)) as opened, served(create_folder_app(opened)) as server:
        listed = server.words("/")
        shown, text = server.page(path), server.words(path)
        others = [server.ask(f"/in/{result.folder.name}/{page}").status for page in ("buffer", "mixing")]
    assert f"{result.folder.name} {result.folder.name} finished {result.updates} of {result.updates}" in listed
    assert f"{data}, from {qwen2}" in text
    assert f"{result.held_out_before:.3f} → {result.held_out_after:.3f}" in text
    panels = {panel["title"]: panel["curves"] for panel in charts_of(shown).values()}
    assert len(panels) == 3
    curves = {curve["label"]: curve["points"] for curve in panels["Loss of demonstrations"]}
    rows = logged(result)
    assert curves["training"] == [[row["iteration"], row["sft/loss"]] for row in rows[1:]]
    losses = [[row["iteration"], row["sft/held_out_loss"]] for row in rows if "sft/held_out_loss" in row]
    assert curves["held-out"] == losses and len(losses) > 2
    assert others == [200, 200]
    with pytest.raises(ReplayError, match="^RUN must"):  # what is left out there means a run with a buffer
        newest_run_folder(result.folder.parent)


def test_interrupted_sft_names_its_weights_so_far_and_its_folder_is_no_model(
    tmp_path: Path, qwen2: Path, data: Path
) -> None:
    stopped = sft(configured(tmp_path, qwen2, data), display=_StopAt(1))
    assert stopped.model == stopped.folder / "checkpoints/000001/model"
    rule = f"model.path must be a model, got '{stopped.folder}', a run's folder. Name {stopped.model}."
    assert refusal_of(ModelSection, path=str(stopped.folder)) == rule


@pytest.mark.slow
@pytest.mark.parametrize("after", [3, 9])
def test_stopped_sft_resumes_bit_for_bit(
    tmp_path: Path, qwen2: Path, data: Path, unbroken: tuple[SftResult, SilentDisplay], after: int
) -> None:
    config = configured(tmp_path, qwen2, data)
    stopped = sft(config, display=_StopAt(after))
    assert (stopped.exit_code, stopped.updates, stopped.measured_after) == (143, after, 0 if after < 6 else 6)
    assert not (stopped.folder / "model").exists()
    sft(config, display=_StopAt(1))  # the folder says which one is meant, though this is newer
    mine = config_to_resume(stopped.folder, [])
    resumed = sft(mine, resume=stopped.folder, display=SilentDisplay())
    assert resumed.folder == stopped.folder
    assert_same_bits(resumed.model / "model.safetensors", unbroken[0].model / "model.safetensors")
    assert logged(resumed) == logged(unbroken[0])
    state = "checkpoints/{:06d}/state/state.safetensors"
    assert_same_bits(*(run.folder / state.format(run.updates) for run in (resumed, unbroken[0])))


def test_resumed_sft_must_find_its_conversations_and_its_configuration(tmp_path: Path, qwen2: Path) -> None:
    path = written(tmp_path / "mine.jsonl", [conversation(number) for number in range(12)])
    config = configured(tmp_path, qwen2, path)
    sft(config, display=_StopAt(1))
    with pytest.raises(UserError, match=r"^sft\.epochs must be the run's own when resuming .*-sft-001 \(4\), got 5\."):
        sft(configured(tmp_path, qwen2, path, sft={"epochs": 5}), resume=True, display=SilentDisplay())
    written(path, [conversation(number) for number in range(13)])
    with pytest.raises(UserError, match=r"^sft\.data must hold the conversations that the training began with"):
        sft(config, resume=True, display=SilentDisplay())


def test_loss_that_is_no_number_stops_the_training(tmp_path: Path, qwen2: Path, data: Path) -> None:
    config = configured(tmp_path, qwen2, data, sft={"learning_rate": 1e30, "warmup_updates": 0})
    with pytest.raises(TrainingStopped, match=r"^loss and gradient must be finite, got .* in update 2\."):
        sft(config, display=SilentDisplay())


ONE = json.dumps(conversation(1))


@pytest.mark.parametrize(
    ("content", "sections", "message"),
    [
        ('{"messages": []}\n', {}, ":1: messages must end in a reply of the assistant"),
        (ONE + "\n{", {}, ":2: line must be JSON"),
        ("", {}, "sft.data must hold a conversation of at most context.max_tokens=400 tokens, got none in"),
        (ONE, {}, "sft.data must hold conversations to train on and others to measure on, got 1 of"),
        ("", {"sft": {"data": None}}, "sft.data must be named for sft, got null. Set it with --set sft.data=PATH."),
        ("", {"sft": {"data": "missing.jsonl"}}, "sft.data must be a readable .jsonl file, got 'missing.jsonl': FILE "),
    ],
)
def test_what_can_not_be_learned_is_refused_and_leaves_no_folder(
    tmp_path: Path, qwen2: Path, content: str, sections: dict[str, Any], message: str
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    config = configured(tmp_path / "runs", qwen2, path, **sections)
    assert message in refusal_of(sft, config, display=SilentDisplay())
    assert not (tmp_path / "runs").exists()


SHOP = '''
def look(key: str) -> str:
    """Look up a key.

    Args:
        key: What to look up.
    """
    return key


def right(episode) -> float:
    return 0.0
'''
_KEY = {"type": "string", "description": "What to look up."}
LOOK = {
    "name": "look",
    "description": "Look up a key.",
    "parameters": {"type": "object", "properties": {"key": _KEY}, "required": ["key"]},
}


@pytest.mark.parametrize(
    ("tools", "system", "remark"),
    [
        ([LOOK], "Look it up.", None),
        (None, "Look it up.", ":1, tool look is not shown. "),
        ([{**LOOK, "description": "Look."}], "Look it up.", ":1, tool look is described otherwise. "),
        ([LOOK, {**LOOK, "name": "find"}], "Look it up.", ":1, tool find is not its own. "),
        ([LOOK], "Look.", ":1, the system message is 'Look.'. "),
        ([LOOK], None, ":1, the system message is ''. "),
    ],
)
def test_demonstrations_that_the_environment_will_not_show_are_remarked_on(
    tmp_path: Path, tools: list[dict[str, Any]] | None, system: str | None, remark: str | None
) -> None:
    config, rows = shop(tmp_path), [conversation(number) for number in range(2)]
    for row in rows if tools else ():
        row["tools"] = [{"type": "function", "function": tool} for tool in tools or ()]
    for row in rows if system else ():
        row["messages"].insert(0, {"role": "system", "content": system})
    written(tmp_path / "mine.jsonl", rows)
    found = compare_with_environment(config)
    if remark is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith("2 of 2 demonstrations differ from what rows will show: ") and remark in found


def shop(folder: Path) -> RunConfig:
    (folder / "shop.py").write_text(SHOP)
    tasks = written(folder / "tasks.jsonl", [{"question": f"Question {number}"} for number in range(40)])
    environment = {"name": "rows", "tools": [f"{folder}/shop.py:look"]}
    environment["options"] = {"prompt": "question", "system": "Look it up."}
    reward = {"functions": [f"{folder}/shop.py:right"]}
    data, none = folder / "mine.jsonl", Path("none")
    return configured(folder, none, data, environment=environment, tasks={"data": str(tasks)}, reward=reward)


def test_sft_needs_none_of_the_environment_s_tasks(tmp_path: Path) -> None:
    written(tmp_path / "mine.jsonl", [conversation(1)])
    config = shop(tmp_path)
    (tmp_path / "tasks.jsonl").unlink()
    found = compare_with_environment(config)
    assert found is not None and found.startswith("demonstrations were not compared with the environment: tasks.data ")


def test_demonstrations_of_other_tools_alone_are_refused(tmp_path: Path) -> None:
    call = {**CALL, "function": {"name": "find", "arguments": "{}"}}
    written(tmp_path / "mine.jsonl", [conversation(1, tool_calls=[call])])
    with pytest.raises(UserError, match=r"^sft\.data must show tools of rows \(look\), got only find in "):
        compare_with_environment(shop(tmp_path))


def test_held_out_file_is_only_measured_and_what_is_too_long_is_left_out(tmp_path: Path, qwen2: Path) -> None:
    long = conversation(1)
    long["messages"][2]["content"] = "long " * 500
    path = written(tmp_path / "mine.jsonl", [long, *(conversation(number) for number in range(24))])
    others = written(tmp_path / "others.jsonl", [conversation(number) for number in range(100, 103)])
    display = SilentDisplay()
    result = sft(configured(tmp_path, qwen2, path, sft={"held_out": str(others), "epochs": 1}), display=display)
    assert (result.conversations, result.held_out, result.updates) == (24, 3, 6)
    assert "demonstrations: 24 to train on, 3 held out, 1 left out as too long for the context" in display.notes


def without_a_model(folder: Path, data: Path, **sections: Any) -> RunConfig:
    config = configured(folder, Path("none"), data, optimizer={"name": "muon"}, **sections)
    tiny = TinyModelSection(layers=1, hidden=32, vocabulary=420)
    return config.model_copy(update={"model": ModelSection(), "tiny": tiny})


@pytest.mark.slow
def test_new_model_resumes_bit_for_bit_and_depends_on_the_seed(tmp_path: Path, data: Path) -> None:
    whole = sft(without_a_model(tmp_path / "whole", data), display=SilentDisplay())
    stopped = without_a_model(tmp_path / "stopped", data)
    assert sft(stopped, display=_StopAt(3)).exit_code == 143
    resumed = sft(stopped, resume=True, display=SilentDisplay())
    assert_same_bits(resumed.model / "model.safetensors", whole.model / "model.safetensors")
    trained = load_model(ModelSection(), resumed.model)
    assert len(trained.codec.encode('{"name": "look", "arguments": {"key": "')) < 12  # pieces of the conversations
    assert resumed.held_out_after < resumed.held_out_before - 1.5  # nats
    other = stopped.model_copy(update={"run": stopped.run.model_copy(update={"seed": 1})})
    assert sft(other, display=SilentDisplay()).held_out_before != whole.held_out_before
