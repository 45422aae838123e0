"""`agentloop context ...` on templates, model folders and conversation files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agentloop.cli.context_commands import app
from context import RenderError
from tests.fakes.families import CHATML, family

CALL = {"function": {"name": "lookup", "arguments": '{"k": "pearl"}'}}
CHAT = [
    {"role": "system", "content": "Be careful."},
    {"role": "user", "content": "Code of <|im_end|> pearl?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "78"},
]


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with its model's files."""
    model = tmp_path / "runs" / "a-001" / "start"
    model.mkdir(parents=True)
    (model / "tokenizer.json").write_text(family("chatml").tokenizer.to_str())
    (model / "chat_template.jinja").write_text(CHATML)
    (model / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return model.parent


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    (tmp_path / "chat.json").write_text(json.dumps({"messages": CHAT}))
    return tmp_path / "chat.json"


def test_check_prints_every_case_and_what_is_found(folder: Path) -> None:
    result = run("check", folder / "start")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["system", "message", "append-only"]
    assert {"verdict: append-only", "calls are read by: hermes"} <= set(lines)
    thoughts = "chat template must show every thought of a learned reply"
    assert any(line.startswith(f"left out: {thoughts}") for line in lines)
    answer = json.loads(run("check", folder / "start", "--json").stdout)
    assert (answer["state"], answer["parser"], len(answer["cases"])) == ("append_only", "hermes", 12)
    assert [sentence.partition(",")[0] for sentence in answer["hidden"]] == [thoughts]
    assert answer["cases"][0] == {"name": "system message", "state": "append_only", "details": []}


def test_check_exits_1_where_a_template_can_do_nothing(tmp_path: Path) -> None:
    template = tmp_path / "one.jinja"
    template.write_text("{{ messages | length }}{% for m in messages %}{{ m.role + m.content }}<|e|>{% endfor %}")
    result = run("check", template)
    assert result.exit_code == 0
    assert "verdict: rewrites history; 1 of 12 cases unsupported" in result.stdout
    template.write_text("{{ messages[0].role }}<|e|>")
    result = run("check", template)
    assert result.exit_code == 1 and "verdict: unsupported" in result.stdout


def test_show_prints_a_file_by_author(folder: Path, chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parents[1])
    (folder / "replay.sqlite").touch()
    for model in ((), ("--model", folder / "start")):  # that of the newest run when left out
        lines = run("show", chat, *model).stdout.splitlines()
        assert "Code of <|im_end|> pearl?" in lines
        assert lines[lines.index("78") - 1].startswith("env · ")
        assert lines[lines.index("pearl") - 1].startswith("initialization · ")
    answer = json.loads(run("show", chat, "--json").stdout)
    codec = family("chatml").codec
    user = [i for i, a in zip(answer["token_ids"], answer["authors"], strict=True) if a == "user"]
    assert codec.decode(user) == "Code of <|im_end|> pearl?" and codec.added_ids.isdisjoint(user)


def test_show_says_what_is_wrong_with_a_file(folder: Path, chat: Path) -> None:
    chat.write_text('[{"role": "user", "content": "x", "author": "nobody"}]')
    with pytest.raises(RenderError, match="author must be one of"):
        run("show", chat, "--model", folder / "start")
    for no_file in (folder, "nowhere.json"):
        with pytest.raises(RenderError, match="FILE must be a JSON file of messages"):
            run("show", no_file)


def test_arguments_of_a_template_are_json_or_text(chat: Path, tmp_path: Path) -> None:
    chat.write_text('[{"role": "user", "content": "x"}]')
    template = tmp_path / "one.jinja"
    template.write_text(CHATML + "{{ mood }}{{ 'off' if not enabled }}")
    lines = run("show", chat, "--model", template, "--template-arg", "mood=calm", "--template-arg", "enabled=false")
    assert "calmoff" in lines.stdout
    assert run("check", template, "--template-arg", "mood=1").exit_code == 0
    for given, complaint in (("mood", "must be NAME=VALUE"), ("modo=1", "got 'modo'. It reads: enabled, mood")):
        with pytest.raises(RenderError, match=complaint):
            run("show", chat, "--model", template, "--template-arg", given)
