"""Tools of a real MCP server: whatever it answers, or does instead, is one observation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from agentloop.config.sections.environments import McpServerSection
from agentloop.environments import Environment, EnvironmentFactory, ToolLimits, ToolResult, load_environment
from context.messages import ToolCall
from tests.fakes.environments.faulty_tools import called
from tests.fakes.mcp_servers import ended, over_http, program

pytestmark = pytest.mark.slow

LIMITS = ToolLimits(timeout_s=60.0, max_chars=100)
Way = tuple[EnvironmentFactory, Environment]


@pytest.fixture(scope="module", params=["pipes", "http"])
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    """An episode's instance, connected to the server over its pipes and over HTTP."""
    section = program() if request.param == "pipes" else McpServerSection(url=request.getfixturevalue("url"))
    factory = load_environment("lookup_chain", {}, servers={"notes": section})
    environment = factory.create()
    with factory.connected_now(environment):
        yield factory, environment


def ask(way: Way, tool: str, /, *, timeout_s: float = LIMITS.timeout_s, **arguments: Any) -> ToolResult:
    return called(way[1], ToolCall(tool, arguments), ToolLimits(timeout_s, LIMITS.max_chars))


def error(result: ToolResult) -> str:
    text = json.loads(result.content)["error"]
    assert isinstance(text, str)
    return text


def test_server_tools_are_offered_with_their_schemas_beside_the_environments_own(way: Way) -> None:
    functions = {tool["function"]["name"]: tool["function"] for tool in way[0].tools}
    assert list(functions)[:3] == ["lookup", "keep", "kept"]
    assert functions["keep"]["description"] == "Keep a note.\n\nReturns how many there are."
    assert functions["keep"]["parameters"]["properties"]["text"]["type"] == "string"
    assert functions["keep"]["parameters"]["required"] == ["text"]
    assert functions["kept"]["parameters"]["properties"] == {}


def test_results_with_text_and_with_structure_are_shown(way: Way) -> None:
    assert ask(way, "say", text="grüße") == ToolResult("grüße")
    assert json.loads(ask(way, "add_numbers", a=1).content) == {"sum": 3}
    picture = ask(way, "picture")
    assert picture == ToolResult("a dot\n[image left out: image/png]")
    assert ask(way, "chatter") == ToolResult("said it")


def test_arguments_that_do_not_fit_the_servers_schema_are_the_policys_error(way: Way) -> None:
    wrong = [ask(way, "keep", text=3), ask(way, "keep"), ask(way, "add_numbers", a=True)]
    assert [result.error_kind for result in wrong] == ["bad_arguments"] * 3
    assert error(wrong[0]) == "argument 'text': 3 is not of type 'string'"
    assert error(wrong[1]) == "'text' is a required property"


def test_state_lasts_through_failures_a_hang_and_a_flood_of_100_mb(way: Way) -> None:
    assert ask(way, "keep", text="a").content == "1"
    failed = ask(way, "fail", words=100)
    assert failed.error_kind == "raised"
    assert error(failed).startswith("Error executing tool fail: bad bad")
    assert error(failed).endswith("characters left out]")
    hung = ask(way, "hang", timeout_s=0.3)
    assert (hung.error_kind, error(hung)) == ("timeout", "hang took longer than 0.3 s")
    long = ask(way, "flood", megabytes=1)
    assert long.content == "x" * 100 + f"... [cut: {(1 << 20) - 100} characters left out]"
    flood = ask(way, "flood", megabytes=100)
    assert flood.error_kind == "raised"
    assert error(flood).endswith("the answer was longer than 8 MB and was left out")
    assert ask(way, "keep", text="b").content == "2"


def test_tools_that_the_server_takes_back_are_still_offered_and_answer_with_an_error(way: Way) -> None:
    assert ask(way, "forget").content == "changed"
    assert "kept" in [tool["function"]["name"] for tool in way[0].tools]
    assert ask(way, "kept").error_kind == "raised"
    assert ask(way, "new").error_kind == "unknown_tool"


@pytest.mark.parametrize("way", ["pipes"], indirect=True)
def test_server_that_crashes_ends_with_all_it_started_and_each_further_call_says_so(way: Way) -> None:
    factory = way[0]
    environment = factory.create()
    with factory.connected_now(environment):
        child, server = map(int, ask((factory, environment), "child").content.split())
        crashed = ask((factory, environment), "crash")
        assert (crashed.error_kind, error(crashed)) == ("crashed", "the server notes has ended")
        assert crashed.problem == "the server notes has ended: exit code 3; out of luck"
        assert ask((factory, environment), "keep", text="a").error_kind == "crashed"
    assert ended(child)
    assert ended(server)
    assert ask(way, "keep", text="c").content == "3"  # another episode's own server


@pytest.mark.soak
def test_server_that_is_shared_is_found_again_when_it_is_back() -> None:
    with over_http() as url:
        factory = load_environment("lookup_chain", {}, servers={"notes": McpServerSection(url=url)})
        environment = factory.create()
        with factory.connected_now(environment):
            assert ask((factory, environment), "keep", text="a").content == "1"
            assert ask((factory, environment), "crash").error_kind == "crashed"
            assert ask((factory, environment), "keep", text="a").error_kind == "crashed"
            with over_http(port=int(url.split(":")[2].split("/")[0])):
                assert ask((factory, environment), "keep", text="a").content == "1"
