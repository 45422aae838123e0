"""`agentloop context check` on templates and model folders."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agentloop.cli.context_commands import app
from tests.fakes.families import CHATML, family
from tests.fakes.real_templates import real_template


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's files."""
    (tmp_path / "tokenizer.json").write_text(family("chatml").tokenizer.to_str())
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return tmp_path


def test_check_prints_every_case_and_what_is_found(folder: Path) -> None:
    result = run("check", folder)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["system", "message", "append-only"]
    said = {"verdict: append-only", "context.parser: auto takes hermes"}
    assert said | {"system messages: shown", "tools: shown", "calls: shown", "results: shown"} <= set(lines)
    thoughts = "chat template must show every thought of a learned reply"
    assert any(line.startswith(f"thoughts: left out: {thoughts}") for line in lines)
    answer = json.loads(run("check", folder, "--json").stdout)
    assert (answer["state"], answer["parser"], len(answer["cases"])) == ("append-only", "hermes", 12)
    assert [part for part, why in answer["parts"].items() if why is not None] == ["thoughts"]
    assert answer["parts"]["thoughts"].partition(",")[0] == thoughts
    assert answer["cases"][0] == {"name": "system message", "state": "append-only", "details": []}


def test_check_says_why_auto_takes_no_parser(tmp_path: Path) -> None:
    template = tmp_path / "one.jinja"
    template.write_text(real_template("trl/lfm2").text)
    assert "context.parser: auto is refused: context.parser must be named for a chat" in run("check", template).stdout
    template.write_text(real_template("written/smollm2").text)
    found = run("check", template)
    assert "context.parser: auto takes react" in found.stdout
    assert found.stdout.count("can't be shown again once rewritten") == 1
    assert found.exit_code == 1
    assert found.stdout.splitlines()[-1] == (
        "not usable with tools: set context.template: hermes or a .jinja file of your own (for this vocabulary)"
    )
    assert not json.loads(run("check", template, "--json").stdout)["works_with_tools"]


def test_check_exits_1_where_a_template_can_do_nothing_with_tools(tmp_path: Path) -> None:
    template = tmp_path / "one.jinja"
    template.write_text("{{ messages | length }}{% for m in messages %}{{ m.role + m.content }}<|e|>{% endfor %}")
    result = run("check", template)
    assert result.exit_code == 1
    assert "verdict: rewrites history; 1 of 12 cases unsupported" in result.stdout
