"""What a configuration says of MCP servers: what is wrong with it is one line before the run begins."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from agentloop.config.config_file import load_config
from agentloop.config.sections.environments import McpServerSection
from agentloop.environments import load_environment
from agentloop.errors import UserError


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        ("{command: [python], url: 'http://x'}", "notes must have either command or url, got command, url."),
        ("{}", "notes must have either command or url, got nothing."),
        ("{url: 'ftp://x'}", "notes.url must be text matching ^https?://[^@]+$ or null, got 'ftp://x'."),
        ("{comand: [x]}", "notes.comand must be a known key, got an unknown one. Known are command, env, "),
        ("{url: 'http://x', env: {A: b}}", "notes must not have env, which belongs to command, got url, env."),
    ],
)
def test_setting_that_is_wrong_is_named_with_its_line(tmp_path: Path, server: str, problem: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{seed: 1}}\nenvironment:\n  mcp_servers:\n    notes: {server}\n")
    with pytest.raises(UserError) as caught:
        load_config(file)
    assert str(caught.value).startswith(f"{file}:3: environment.mcp_servers.{problem}")


def refusal(**servers: McpServerSection) -> str:
    with pytest.raises(UserError) as caught:
        load_environment("lookup_chain", {}, servers=servers)
    return str(caught.value)


def python(code: str, **settings: Any) -> McpServerSection:
    return McpServerSection(command=(sys.executable, "-S", "-c", code), **settings)


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (
            McpServerSection(command=("no-such-program", "x")),
            " must be a server that lists its tools, got 'no-such-program x' with: FileNotFoundError: there is no ",
        ),
        (python("import sys; sys.exit('no notes here')"), "with: exit code 1; no notes here. Try it by hand."),
        (python("import time; time.sleep(600)", start_timeout_s=0.3), "with: no answer within start_timeout_s=0.3 s ("),
        (McpServerSection(url="http://127.0.0.1:9/mcp"), "got 'http://127.0.0.1:9/mcp' with: ConnectError: "),
        (python("", pass_env=("NO_SUCH",)), ".pass_env must name variables that are set, got 'NO_SUCH'."),
        (McpServerSection(url="http://x", token_env="NO_SUCH"), ".token_env must name variables that are set, got"),
    ],
)
def test_server_that_can_not_be_asked_is_one_error_with_what_it_said(section: McpServerSection, problem: str) -> None:
    said = refusal(notes=section)
    assert said.startswith("environment.mcp_servers.notes") and problem in said


def test_two_tools_of_one_name_are_refused(url: str) -> None:
    some = McpServerSection(url=url, tools=("keep", "kept"))
    assert refusal(a=some, b=McpServerSection(url=url, tools=("kept",))) == (
        "environment.mcp_servers.b must offer tools with names of their own, got 'kept', which is also one of "
        "environment.mcp_servers.a. Name those to offer with environment.mcp_servers.b.tools."
    )
    assert refusal(a=McpServerSection(url=url, tools=("kepts",))) == (
        "environment.mcp_servers.a.tools must be names of its tools, got 'kepts'. Did you mean kept?"
    )
    other = McpServerSection(url=url, tools=("say",))
    factory = load_environment("lookup_chain", {}, servers={"a": some, "b": other})
    assert [tool["function"]["name"] for tool in factory.tools] == ["lookup", "keep", "kept", "say"]


def test_source_of_an_environment_covers_what_its_servers_offer(url: str) -> None:
    sources = {
        load_environment("lookup_chain", {}, servers=servers).source
        for servers in ({}, {"a": McpServerSection(url=url)}, {"a": McpServerSection(url=url, tools=("keep",))})
    }
    assert len(sources) == 3
