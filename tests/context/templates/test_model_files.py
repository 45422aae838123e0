import json
from pathlib import Path

import pytest

from context import ChatTemplate, RenderError, TokenCodec, load_model_files
from context.templates.model_files import (
    from_template,
    spelled_controls,
    stop_ids_of,
    stop_tokens,
    template_source,
    train_tokenizer,
)
from tests.fakes.families import CHATML, family
from tests.fakes.real_templates import SPECIAL_TOKENS, real_template

TOOL_USE = "{{ '<|im_start|>' }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
NAMED = [{"name": "rag", "template": "x"}, {"name": "default", "template": CHATML}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return family("chatml").save(tmp_path)


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


@pytest.mark.parametrize("given", ["no/model", "runs/x/model", "my/template.jinja"])
def test_what_is_no_model_is_refused_in_one_line(given: str) -> None:
    with pytest.raises(RenderError) as refused:
        load_model_files(given)
    assert str(refused.value).startswith(f"MODEL_OR_TEMPLATE must be a model folder or a .jinja file, got {given!r}. ")
    assert "\n" not in str(refused.value)


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


NO_NAME = r"context\.template must be one of hermes, llama3, mistral, or the path"
GIVEN = [
    *(("chatml", given, NO_NAME) for given in ("hermez", "missing.jinja", "", "/dev/null")),
    ("chatml", "llama3", r"got llama3 for one without <\|start_header_id\|>.*: hermes or a .jinja file"),
    ("llama3", "hermes", r"got hermes for one without <\|im_start\|>, <\|im_end\|>.*: llama3 or a .jinja file"),
]


@pytest.mark.parametrize(("vocabulary", "given", "said"), GIVEN)
def test_given_template_that_does_not_fit_is_refused(tmp_path: Path, vocabulary: str, given: str, said: str) -> None:
    with pytest.raises(RenderError, match=said):
        load_model_files(family(vocabulary).save(tmp_path), template=given)


def test_mistral_closes_what_it_opens_wherever_a_system_message_stands() -> None:
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    for messages in ([system], [user, system], [system, system, user], [system, user], [user, system, user]):
        text = from_template(template_source("mistral")).template.render(messages, generation_prompt=True)
        assert text.count("[INST]") == text.count("[/INST]") > 0
        assert text.endswith("[/INST]")


SAYING = "{% for m in messages %}{{ m.role + m.content }}<|end|>{% endfor %}"
COMMAND_R7B, COHERE_EOS = real_template("written/command_r7b").text, "<|END_OF_TURN_TOKEN|>"
CALLING = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
    "{% endfor %}{{ '<|call|>' if m.tool_calls else '<|end|>' }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "tool_use", "stops"),
    [
        (SAYING, CALLING, {"<|end|>", "<|call|>"}),
        (SAYING.replace("<|end|>", ""), None, set()),
        ("{{ raise_exception('never') }}", None, set()),
        (COMMAND_R7B, None, {COHERE_EOS}),  # writes the next header whether it is asked for or not
    ],
)
def test_stops_are_declared_or_of_the_template_for_tools(source: str, tool_use: str | None, stops: set[str]) -> None:
    codec = TokenCodec(train_tokenizer([SAYING], spelled_controls(SAYING + CALLING + COMMAND_R7B)).to_str())
    eos = codec.token_id(COHERE_EOS)
    assert eos is not None
    found = stop_tokens(ChatTemplate(source, SPECIAL_TOKENS, tool_use=tool_use), codec, [eos])
    assert {codec.decode([token]) for token in found} == stops


SEVERAL_MESSAGES = (  # a turn of several messages, each of them closed with <|end|>, but for a call, which is alone
    "{% for m in messages %}{% if m.reasoning_content %}<|start|>thought {{ m.reasoning_content }}<|end|>{% endif %}"
    "<|start|>{{ m.role }} {% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "listed", "stops"),
    [
        (SEVERAL_MESSAGES, ["<|return|>", "<|call|>"], {"<|return|>", "<|call|>"}),
        (SEVERAL_MESSAGES, [], {"</s>", "<|call|>"}),  # what closes a thought ends no turn
        (SEVERAL_MESSAGES, ["</s>"], {"</s>", "<|call|>"}),  # a list of which the template writes nothing is no whole
        (CALLING, ["<|call|>"], {"</s>", "<|call|>"}),  # a whole one, though the template ends answers otherwise
    ],
)
def test_stop_tokens_are_those_that_the_models_files_list(source: str, listed: list[str], stops: set[str]) -> None:
    added = ["</s>", "<|start|>", "<|end|>", "<|call|>", "<|return|>"]
    codec = TokenCodec(train_tokenizer([SAYING], added).to_str())
    eos = "" if "<|return|>" in listed else "</s>"
    ids = [codec.token_id(token) for token in listed]
    found = stop_ids_of(codec, ChatTemplate(source, {}), eos, ids)
    assert {codec.decode([token]) for token in found} == stops
