"""Model folders as people keep them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from context import RenderError, default_authors, load_model_files
from tests.fakes.families import CHATML, family

LOOKUP = {"type": "function", "function": {"name": "lookup", "parameters": {}}}
TOOL_USE = "{{ '<|im_start|>' }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(family("chatml").tokenizer.to_str())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    return tmp_path


@pytest.mark.parametrize("written", ["config", "file", "both"])
def test_template_for_tools_is_found_in_every_layout(model: Path, written: str) -> None:
    if written != "file":
        (model / "chat_template.jinja").unlink()
        rows = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TOOL_USE}]
        if written == "both":
            rows[1]["template"] = "superseded by the file"
        (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": rows}))
    if written != "config":
        (model / "additional_chat_templates").mkdir()
        (model / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)
    template = load_model_files(model).template
    assert (template.source, template.tool_use) == (CHATML, TOOL_USE)


def test_template_file_comes_before_the_configuration(model: Path) -> None:
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "default", "template": "x"}]}))
    assert load_model_files(model).template.source == CHATML


def test_arguments_are_the_templates(model: Path) -> None:
    (model / "chat_template.jinja").write_text(CHATML + "{{ mood }}")
    assert load_model_files(model, template_args={"mood": "calm"}).template.args == {"mood": "calm"}
    with pytest.raises(RenderError, match=r"got 'moood'. It reads: mood\."):
        load_model_files(model, template_args={"moood": "calm"})


def test_ids_that_no_token_has_are_no_stops(model: Path) -> None:
    (model / "generation_config.json").write_text('{"eos_token_id": [-1, true, "x", 3]}')
    assert load_model_files(model).stop_ids == {3, family("chatml").end_id}


def test_renderer_knows_the_stop_strings(model: Path) -> None:
    files = load_model_files(model)
    assert files.renderer(default_authors()).stop_strings == ()
    assert files.renderer(default_authors(), ("Observation:",)).stop_strings == ("Observation:",)


@pytest.mark.parametrize(
    ("name", "remedy"), [("tokenizer.model", r"save_pretrained\(FOLDER\)"), ("tekken.json", "convert_tekken_tokenizer")]
)
def test_folder_with_another_tokenizer_says_how_to_convert_it(model: Path, name: str, remedy: str) -> None:
    (model / "tokenizer.json").rename(model / name)
    with pytest.raises(RenderError, match=rf"must hold tokenizer\.json, got {name} in .*{remedy}"):
        load_model_files(model)


TOKENIZER = json.loads(family("chatml").tokenizer.to_str())


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        json.dumps({**TOKENIZER, "model": None}).encode(),
        json.dumps({**TOKENIZER, "model": {"type": "X"}}).encode(),
        json.dumps({**TOKENIZER, "added_tokens": [{}]}).encode(),
        json.dumps({**TOKENIZER, "normalizer": 3}).encode(),
    ],
)
def test_broken_tokenizer_is_refused_in_one_line(model: Path, broken: bytes) -> None:
    (model / "tokenizer.json").write_bytes(broken)
    with pytest.raises(RenderError, match=r"^tokenizer\.json must be [^\n]*$"):
        load_model_files(model)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "generation_config.json"])
def test_file_that_is_no_text_is_refused_in_one_line(model: Path, name: str) -> None:
    (model / name).write_bytes(b"\xff")
    with pytest.raises(RenderError, match=rf"^{name} must be a text file in UTF-8[^\n]*$"):
        load_model_files(model)
