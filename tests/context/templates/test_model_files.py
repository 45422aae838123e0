"""Model folders as people keep them, with their own template, a built-in one, or one of a person's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from context import RenderError, default_authors, load_model_files
from context.templates.built_in_templates import template_source
from tests.fakes.families import CHATML, family

TOOL_USE = "{{ '<|im_start|>' }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
NAMED = [{"name": "rag", "template": "x"}, {"name": "default", "template": CHATML}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path, "chatml")


def model_folder(folder: Path, name: str) -> Path:
    made = family(name)
    (folder / "tokenizer.json").write_text(made.tokenizer.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(made.special_tokens))
    (folder / "chat_template.jinja").write_text(made.template_source)
    return folder


@pytest.mark.parametrize("written", ["file", "config", "named"])
def test_model_folder_is_read_without_the_model(model: Path, written: str) -> None:
    config: dict[str, object] = {"eos_token": {"content": "<|im_end|>"}}
    if written != "file":
        (model / "chat_template.jinja").unlink()
        config["chat_template"] = CHATML if written == "config" else NAMED
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "generation_config.json").write_text('{"eos_token_id": [-1, true, "x", 3]}')  # no token has most of these
    files = load_model_files(model)
    assert files.template.source == CHATML
    assert files.codec.hash == family("chatml").codec.hash
    assert files.stop_ids == {3, family("chatml").end_id}
    assert files.renderer(default_authors(), ("Observation:",)).stop_strings == ("Observation:",)


@pytest.mark.parametrize("written", ["config", "file", "both"])
def test_template_for_tools_is_found_in_every_layout(model: Path, written: str) -> None:
    if written != "file":
        (model / "chat_template.jinja").unlink()
        rows = [*NAMED, {"name": "tool_use", "template": TOOL_USE if written == "config" else "superseded by the file"}]
        (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": rows}))
    if written != "config":
        (model / "additional_chat_templates").mkdir()
        (model / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)
    template = load_model_files(model).template
    assert (template.source, template.tool_use) == (CHATML, TOOL_USE)


def test_template_file_comes_before_the_configuration_and_a_given_one_before_both(model: Path) -> None:
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "default", "template": "x"}]}))
    assert load_model_files(model).template.source == CHATML
    (model / "chat_template.jinja").unlink()
    files = load_model_files(model, template="hermes")
    assert files.template.source == template_source("hermes")
    assert {files.codec.decode([token]) for token in files.stop_ids} == {"<|im_end|>"}


def test_template_is_given_by_name_by_path_or_as_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert template_source(str(path)) == template_source(path.read_text()) == path.read_text()
    assert "<tool_call>" in template_source("hermes")


def test_arguments_are_the_templates(model: Path) -> None:
    (model / "chat_template.jinja").write_text(CHATML + "{{ mood }}")
    assert load_model_files(model, template_args={"mood": "calm"}).template.args == {"mood": "calm"}
    with pytest.raises(RenderError, match=r"got 'moood'. It reads: mood\."):
        load_model_files(model, template_args={"moood": "calm"})


TOKENIZER = json.loads(family("chatml").tokenizer.to_str())
NO_TOKENIZER = r"^tokenizer\.json must be a"
NO_TEXT = " must be a text file in UTF-8"
BROKEN: list[tuple[str, bytes | None, str]] = [
    ("tokenizer.json", None, r"must hold tokenizer\.json, got none"),
    ("chat_template.jinja", None, "must hold a chat template, got none"),
    ("tokenizer_config.json", b"{", r"^tokenizer_config\.json must be JSON"),
    *((name, b"\xff", f"^{name}{NO_TEXT}") for name in ("chat_template.jinja", "tokenizer_config.json")),
    ("generation_config.json", b"\xff", f"^generation_config.json{NO_TEXT}"),
    *(("tokenizer.json", found, NO_TOKENIZER) for found in (b"", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000)),
    *(
        ("tokenizer.json", json.dumps({**TOKENIZER, **change}).encode(), NO_TOKENIZER)
        for change in ({"model": None}, {"model": {"type": "X"}}, {"added_tokens": [{}]}, {"normalizer": 3})
    ),
]


@pytest.mark.parametrize(("name", "content", "complaint"), BROKEN, ids=range(len(BROKEN)))
def test_broken_folder_is_refused_in_one_line(model: Path, name: str, content: bytes | None, complaint: str) -> None:
    if content is None:
        (model / name).unlink()
    else:
        (model / name).write_bytes(content)
    with pytest.raises(RenderError, match=complaint) as refusal:
        load_model_files(model)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "remedy"), [("tokenizer.model", r"save_pretrained\(FOLDER\)"), ("tekken.json", "convert_tekken_tokenizer")]
)
def test_folder_with_another_tokenizer_says_how_to_convert_it(model: Path, name: str, remedy: str) -> None:
    (model / "tokenizer.json").rename(model / name)
    with pytest.raises(RenderError, match=rf"must hold tokenizer\.json, got {name} in .*{remedy}"):
        load_model_files(model)


NO_NAME = r"context\.template must be one of hermes, llama3, mistral, or the path"
GIVEN = [
    *(("chatml", given, NO_NAME) for given in ("hermez", "missing.jinja", "", "/dev/null")),
    ("chatml", "llama3", r"got llama3 for one without <\|start_header_id\|>.*: hermes or a .jinja file"),
    ("llama3", "hermes", r"got hermes for one without <\|im_start\|>, <\|im_end\|>.*: llama3 or a .jinja file"),
]


@pytest.mark.parametrize(("vocabulary", "given", "complaint"), GIVEN)
def test_given_template_that_does_not_fit_is_refused(
    tmp_path: Path, vocabulary: str, given: str, complaint: str
) -> None:
    with pytest.raises(RenderError, match=complaint):
        load_model_files(model_folder(tmp_path, vocabulary), template=given)
