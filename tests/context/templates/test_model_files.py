"""What is read of a model's folder: its template, a built-in one or a person's, and what ends a reply by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from context import (
    ChatTemplate,
    Message,
    RenderError,
    TokenCodec,
    load_model_files,
)
from context.templates.model_files import (
    from_template,
    spelled_controls,
    stop_tokens,
    template_source,
    train_tokenizer,
)
from tests.fakes.families import CHATML, family
from tests.fakes.real_templates import model

TOOL_USE = "{{ '<|im_start|>' }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
NAMED = [{"name": "rag", "template": "x"}, {"name": "default", "template": CHATML}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path, "chatml")


def model_folder(folder: Path, name: str) -> Path:
    made = family(name)
    (folder / "tokenizer.json").write_text(made.tokenizer.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(made.special_tokens))
    (folder / "chat_template.jinja").write_text(made.template_source)
    return folder


@pytest.mark.parametrize("layout", ["file", "config", "named", "named, and files"])
def test_model_folder_is_read_in_every_layout_without_the_model(folder: Path, layout: str) -> None:
    config: dict[str, object] = {"eos_token": {"content": "<|im_end|>"}}
    if layout != "file":
        (folder / "chat_template.jinja").unlink()
        tool_use = TOOL_USE if layout == "named" else "superseded by the file"
        config["chat_template"] = CHATML if layout == "config" else [*NAMED, {"name": "tool_use", "template": tool_use}]
    if layout == "named, and files":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [-1, true, "x", 3]}')  # no token has most of these
    files = load_model_files(folder)
    assert (files.template.source, files.template.tool_use) == (CHATML, TOOL_USE if "named" in layout else None)
    assert files.codec.hash == family("chatml").codec.hash
    assert files.stop_ids == {3, family("chatml").end_id}


def test_template_file_comes_before_the_configuration_and_a_given_one_before_both(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "default", "template": "x"}]}))
    assert load_model_files(folder).template.source == CHATML
    path = folder / "mine.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    mine = path.read_text()
    for given, source in (("hermes", template_source("hermes")), (str(path), mine), (mine, mine)):
        files = load_model_files(folder, template=given)
        assert files.template.source == source
        assert {files.codec.decode([token]) for token in files.stop_ids} == {"<|im_end|>"}


def test_arguments_are_the_templates(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(CHATML + "{{ mood }}")
    assert load_model_files(folder, template_args={"mood": "calm"}).template.args == {"mood": "calm"}
    with pytest.raises(RenderError, match=r"got 'moood'. It reads: mood\."):
        load_model_files(folder, template_args={"moood": "calm"})


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
def test_broken_folder_is_refused_in_one_line(folder: Path, name: str, content: bytes | None, complaint: str) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(RenderError, match=complaint) as refusal:
        load_model_files(folder)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "remedy"), [("tokenizer.model", r"save_pretrained\(FOLDER\)"), ("tekken.json", "convert_tekken_tokenizer")]
)
def test_folder_with_another_tokenizer_says_how_to_convert_it(folder: Path, name: str, remedy: str) -> None:
    (folder / "tokenizer.json").rename(folder / name)
    with pytest.raises(RenderError, match=rf"must hold tokenizer\.json, got {name} in .*{remedy}"):
        load_model_files(folder)


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


def test_mistral_closes_what_it_opens_wherever_a_system_message_stands() -> None:
    system, user = Message("system", "s", "initialization"), Message("user", "u")
    for messages in ([system], [user, system], [system, system, user], [system, user], [user, system, user]):
        text = from_template(template_source("mistral")).template.render(messages, generation_prompt=True)
        assert text.count("[INST]") == text.count("[/INST]") > 0
        assert text.endswith("[/INST]")


PHI_4_MINI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.tool_calls %}{{ '<|tool_call|>' + (m.tool_calls | tojson) + '<|/tool_call|>' }}{% endif %}"
    "{{ m.content + '<|end|>' }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt else '<|endoftext|>' }}"
)
ALWAYS_PROMPTED = (  # ToolACE, Command R7B: the generation prompt stands there whether it is asked for or not
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + (c.function.arguments | tojson) + ']' }}{% endfor %}"
    "{{ '<|eot_id|>' }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>' }}"
)
WRAPPED = (
    "{% for m in messages %}{{ '<|START_OF_TURN|>' + m.role }}"
    "{% if m.tool_calls %}<|START_ACTION|>{{ m.tool_calls | tojson }}<|END_ACTION|>"
    "{% else %}{{ '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}{% endif %}<|END_OF_TURN|>{% endfor %}"
    "<|START_OF_TURN|>assistant"
)
CALLING = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
    "{% endfor %}{{ '<|call|>' if m.tool_calls else '<|end|>' }}{% endfor %}"
)


def found(source: str, *declared: str, tool_use: str | None = None) -> set[str]:
    written = source + (tool_use or "")
    added = list(dict.fromkeys([*spelled_controls(written), "<|user|>", "<|system|>", "<|tool|>", *declared]))
    codec = TokenCodec(train_tokenizer(written.splitlines(), added).to_str())
    ids = [token for token in map(codec.token_id, declared) if token is not None]
    template = ChatTemplate(source, {}, tool_use=tool_use)
    return {codec.decode([token]) for token in stop_tokens(template, codec, ids)}


@pytest.mark.parametrize(
    ("source", "declared", "stops"),
    [
        (PHI_4_MINI, (), {"<|end|>"}),
        (PHI_4_MINI, ("<|endoftext|>",), {"<|end|>"}),
        (PHI_4_MINI, ("<|end|>", "<|endoftext|>"), {"<|end|>"}),
        (ALWAYS_PROMPTED, (), {"<|eot_id|>"}),
        (WRAPPED, ("<|END_OF_TURN|>",), {"<|END_OF_TURN|>"}),
        ("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", (), set()),
        ("{{ raise_exception('never') }}", (), set()),
    ],
)
def test_stops_are_the_end_of_turn_and_nothing_of_the_prompt_behind_it(
    source: str, declared: tuple[str, ...], stops: set[str]
) -> None:
    assert found(source, *declared) == stops
    plain = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    assert found(plain, tool_use=CALLING) == {"<|end|>", "<|call|>"}


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        ("deepseekv3", {"<｜end▁of▁sentence｜>"}),
        ("gemma4_v5", {"<turn|>", "<|tool_response>"}),
        ("glm4moe", {"<|user|>", "<|observation|>"}),
        ("gptoss", {"<|return|>", "<|call|>"}),
        ("llama3_1", {"<|eot_id|>"}),
        ("phi3", {"<|end|>"}),
        ("qwen3", {"<|im_end|>"}),
        ("smolvlm", {"<end_of_utterance>"}),
    ],
)
def test_stops_of_real_templates_are_those_and_the_models_eos(name: str, stops: set[str]) -> None:
    files = model(name)
    assert {files.codec.decode([token]) for token in files.stop_ids} == stops | {"</s>"}
