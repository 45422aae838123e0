"""`context.template`: a model whose own template knows no tools is refused by name, and trains with a given one."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from agentloop.analysis.exported_model import export_run
from agentloop.analysis.stored_policies import evaluate_run
from agentloop.environments import load_environment
from agentloop.supervised.sft import sft
from agentloop.training.train import train
from context import load_model_files
from context.messages import to_template
from context.templates.model_files import template_source
from replay.store import ReplayStore
from tests.fakes.real_templates import real_template
from tests.fakes.runs import ROOT, SilentDisplay, buffer_of, rows, save_qwen2, small_config

pytestmark = pytest.mark.slow

CALCULATOR = f"{ROOT / 'examples/calculator.py'}:Calculator"
TINY: dict[str, Any] = {
    "environment": {"name": CALCULATOR},
    "run": {"iterations": 1},
    "batch": {"trajectories": 4, "mini_batch": 4, "group_size": 2},
    "evaluation": {"tasks": 2, "every": 1},
    "replay": {"fraction": 0.0},
}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template is SmolLM2's: ChatML without tools."""
    folder = save_qwen2(tmp_path_factory.mktemp("models") / "bare")
    (folder / "chat_template.jinja").write_text(real_template("written/smollm2").text)
    return folder


ITS_TOOLS: dict[str, Any] = {"environment": {"name": CALCULATOR}}
"""The environment whose tool is demonstrated."""


def demonstrated(path: Path) -> Path:
    called = {"id": "call00001", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 3, "b": 4}'}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call00001", "content": "12"},
    ]
    written = []
    for number in range(8):
        reply = {"role": "assistant", "content": str(number)}
        messages = [{"role": "user", "content": f"Question {number}"}, *turns, reply]
        tools = list(load_environment(CALCULATOR, {}).tools)
        written.append(json.dumps({"messages": messages, "tools": tools}) + "\n")
    path.write_text("".join(written))
    return path


SHORT: dict[str, Any] = {"epochs": 1, "batch": 4}


def test_hidden_tools_and_calls_can_be_insisted_on(bare: Path, tmp_path: Path) -> None:
    insisting = {"context": {"max_tokens": 400, "allow_hidden_tools": True}}
    assert train(small_config(tmp_path, bare, **TINY, **insisting), display=SilentDisplay()).exit_code == 0
    data = demonstrated(tmp_path / "a.jsonl")
    how = {**SHORT, "data": str(data)}
    assert sft(small_config(tmp_path, bare, sft=how, **insisting, **ITS_TOOLS), display=SilentDisplay()).updates == 2


def test_run_with_a_built_in_template_has_it_in_every_folder(bare: Path, tmp_path: Path) -> None:
    given = {"context": {"max_tokens": 400, "template": "hermes"}}
    run = train(small_config(tmp_path, bare, **TINY, **given), display=SilentDisplay()).folder
    export_run(run, str(tmp_path / "exported"))
    for folder in (run / "start", run / "model", run / "policies" / "000001", tmp_path / "exported"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == template_source("hermes")
    database = buffer_of(run)
    with closing(ReplayStore.open(database, read_only=True)) as store:
        (stored,) = store.read([rows(database, "select id from trajectories")[0][0]])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    shown, tools = [to_template(stored.messages[0])], list(load_environment(CALCULATOR, {}).tools)
    prompt = tokenizer.apply_chat_template(shown, tools=tools, add_generation_prompt=True)["input_ids"]
    assert stored.segments[0].tokens.token_ids.tolist()[: len(prompt)] == prompt
    assert "multiply" in tokenizer.decode(prompt)
    assert evaluate_run(run).to_json()


def test_sft_with_a_given_template_hands_it_on(bare: Path, tmp_path: Path) -> None:
    section = {**SHORT, "data": str(demonstrated(tmp_path / "a.jsonl"))}
    given = {"context": {"max_tokens": 400, "template": "hermes"}}
    result = sft(small_config(tmp_path, bare, sft=section, **given, **ITS_TOOLS), display=SilentDisplay())
    assert AutoTokenizer.from_pretrained(result.model).chat_template == template_source("hermes")
    assert train(small_config(tmp_path, result.model, **TINY), display=SilentDisplay()).exit_code == 0


def test_built_in_model_takes_a_given_template(tmp_path: Path) -> None:
    of_run = {**TINY, "environment": {"name": "lookup_chain"}, "warm_up": {"max_updates": 1, "batch": 2}}
    config = small_config(tmp_path, tmp_path, **of_run, context={"max_tokens": 1000, "template": "hermes"})
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": None})})
    run = train(config, display=SilentDisplay()).folder
    for folder in (run / "start", run / "model"):
        assert load_model_files(folder).template.source == template_source("hermes")
