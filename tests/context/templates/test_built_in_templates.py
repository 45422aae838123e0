"""Built-in templates: they only append, show everything, are read back by their parser, and are transformers' text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from context import Message, ToolCall, choose_parser
from context.authors import LLM
from context.messages import to_template
from context.templates.built_in_templates import BUILT_IN_TEMPLATES, template_source
from context.templates.model_files import ModelFiles, from_template, load_model_files
from context.templates.row_forms import LOOKUP
from context.templates.template_report import check_template
from tests.context.templates.test_model_files import model_folder
from tests.fakes.families import family
from tests.fakes.real_templates import AUTHORS

PARSERS = {"hermes": "hermes", "llama3": "llama3_json", "mistral": "mistral"}
VOCABULARIES = {"hermes": "chatml", "llama3": "llama3", "mistral": "mistral"}
CALLS = (ToolCall("lookup", {"key": 'a "pearl", é', "n": 3, "more": {"see": [1, None]}}), ToolCall("lookup", {}))
CONVERSATION = (
    Message("system", "Be careful.", "initialization"),
    Message("user", "Which code?"),
    Message("assistant", "I look it up.", LLM, CALLS, reasoning="A record."),
    Message("tool", '{"next": "arrow"}', "env", name="lookup"),
    Message("tool", "12", "env", name="lookup"),
    Message("assistant", "78.", LLM, reasoning=""),
    Message("user", "And now?"),
)
REPLIES = {
    "answer": Message("assistant", "78.", LLM),
    "thought": Message("assistant", "78.", LLM, reasoning="Which\nrecord?"),
    "call": Message("assistant", "", LLM, CALLS[:1]),
    "call without arguments": Message("assistant", "", LLM, CALLS[1:]),
    "parallel calls": Message("assistant", "", LLM, CALLS),
    "text and calls": Message("assistant", "I look it up.", LLM, CALLS),
    "thought and calls": Message("assistant", "", LLM, CALLS, reasoning="A record."),
    "everything": CONVERSATION[2],
}


def model(name: str) -> ModelFiles:
    return from_template(template_source(name))


def test_mistral_closes_what_it_opens_wherever_a_system_message_stands() -> None:
    system, user = Message("system", "s", "initialization"), Message("user", "u")
    for messages in ([system], [user, system], [system, system, user], [system, user], [user, system, user]):
        text = model("mistral").template.render(messages, generation_prompt=True)
        assert text.count("[INST]") == text.count("[/INST]") > 0
        assert text.endswith("[/INST]")


@pytest.mark.parametrize("name", BUILT_IN_TEMPLATES)
def test_built_in_template_only_appends_and_leaves_nothing_out(name: str) -> None:
    report = check_template(model(name))
    assert {case.state for case in report.cases} == {"append_only"}
    assert [case.details for case in report.cases if case.details] == []
    assert report.hidden == ()
    assert report.parser == PARSERS[name]


@pytest.mark.parametrize("tools", [[], [LOOKUP]], ids=["plain", "tools"])
@pytest.mark.parametrize("name", BUILT_IN_TEMPLATES)
def test_prompts_are_those_of_transformers(tmp_path: Path, name: str, tools: list[dict[str, Any]]) -> None:
    made = family(VOCABULARIES[name])
    reference = PreTrainedTokenizerFast(
        tokenizer_object=made.tokenizer, chat_template=template_source(name), **made.special_tokens
    )
    renderer = load_model_files(model_folder(tmp_path, made.name), template=name).renderer(AUTHORS)
    for end in range(2, len(CONVERSATION) + 1):
        shown = [replace(row, author="history") if row.author == LLM else row for row in CONVERSATION[:end]]
        ids = renderer.initial(shown, tools).token_ids.tolist()
        rows = [to_template(row) for row in shown]
        expected = reference.apply_chat_template(rows, tools=tools or None, add_generation_prompt=True, tokenize=True)
        assert expected["input_ids"] == ids


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("name", BUILT_IN_TEMPLATES)
def test_written_replies_are_read_back(name: str, reply: str) -> None:
    files = model(name)
    *said, stop = files.renderer(AUTHORS).reply(REPLIES[reply])
    assert stop in files.stop_ids
    read = choose_parser("auto", files.template, tools=[LOOKUP]).parse(files.codec.decode(said), stopped=True)
    assert read.message == REPLIES[reply]
