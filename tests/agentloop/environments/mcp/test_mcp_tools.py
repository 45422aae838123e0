"""Tools of real MCP servers: whatever one answers, or does instead, is one observation; it ends with its episode."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from agentloop.config import RunConfig
from agentloop.config.sections.environments import McpServerSection
from agentloop.config.sections.rollout import RolloutSection
from agentloop.environments import Environment, EnvironmentFactory, ToolResult, load_environment
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.episodes.run_episodes import run_episodes
from tests.fakes.environments import faulty_tools
from tests.fakes.environments.faulty_tools import error
from tests.fakes.mcp_servers import ended, over_http, program
from tests.fakes.refusals import refusal_of
from tests.fakes.scripted import call, scripted_actors, shown

pytestmark = pytest.mark.slow

Way = tuple[EnvironmentFactory, Environment]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with over_http() as url:
        yield url


@pytest.fixture(scope="module", params=["pipes", "http"])
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    """An episode's instance, connected to the server over its pipes and over HTTP."""
    section = program() if request.param == "pipes" else McpServerSection(url=request.getfixturevalue("url"))
    factory = load_environment("lookup_chain", {}, servers={"notes": section})
    environment = factory.create()
    with factory.connected(environment) as servers:
        servers.result()
        yield factory, environment


def ask(way: Way, tool: str, /, *, timeout_s: float = 60.0, **arguments: Any) -> ToolResult:
    limits = RolloutSection(tool_timeout_s=timeout_s, tool_output_chars=100)
    return faulty_tools.ask(way[1], tool, limits=limits, **arguments)


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
    assert ask(way, "picture") == ToolResult("a dot\n[image left out]")
    assert ask(way, "chatter") == ToolResult("said it")


def test_arguments_that_do_not_fit_the_servers_schema_are_the_policys_error(way: Way) -> None:
    wrong = [ask(way, "keep", text=3), ask(way, "keep"), ask(way, "add_numbers", a=True)]
    assert [result.error_kind for result in wrong] == ["bad_arguments"] * 3
    assert error(wrong[0]) == "argument 'text': 3 is not of type 'string'"
    assert error(wrong[1]) == "'text' is a required property"


def test_state_lasts_through_failures_a_hang_and_a_long_answer(way: Way) -> None:
    assert ask(way, "keep", text="a").content == "1"
    failed = ask(way, "fail", words=100)
    assert failed.error_kind == "raised"
    assert error(failed).startswith("Error executing tool fail: bad bad")
    assert error(failed).endswith("characters left out]")
    hung = ask(way, "hang", timeout_s=0.3)
    assert (hung.error_kind, error(hung)) == ("timeout", "hang took longer than 0.3 s")
    long = ask(way, "flood", megabytes=1)
    assert long.content == "x" * 100 + f"... [cut: {(1 << 20) - 100} characters left out]"
    assert ask(way, "keep", text="b").content == "2"


@pytest.mark.parametrize("way", ["pipes"], indirect=True)
def test_server_that_crashes_ends_with_all_it_started_and_each_further_call_says_so(way: Way) -> None:
    factory = way[0]
    environment = factory.create()
    with factory.connected(environment) as servers:
        servers.result()
        child, server = map(int, ask((factory, environment), "child").content.split())
        crashed = ask((factory, environment), "crash")
        assert (crashed.error_kind, error(crashed)) == ("crashed", "the server notes has ended")
        assert crashed.problem == "the server notes has ended: out of luck"
        assert ask((factory, environment), "keep", text="a").error_kind == "crashed"
    assert ended(child)
    assert ended(server)
    assert ask(way, "kept").error_kind is None  # the server of another episode goes on


@pytest.mark.soak
def test_server_that_is_shared_is_found_again_when_it_is_back() -> None:
    with over_http() as url:
        factory = load_environment("lookup_chain", {}, servers={"notes": McpServerSection(url=url)})
        shared = factory, factory.create()
        with factory.connected(shared[1]) as servers:
            servers.result()
            assert ask(shared, "keep", text="a").content == "1"
            assert ask(shared, "crash").error_kind == "crashed"
            assert ask(shared, "keep", text="a").error_kind == "crashed"
            with over_http(port=int(url.split(":")[2].split("/")[0])):
                assert ask(shared, "keep", text="a").content == "1"


# Whole episodes


def play(section: McpServerSection, scripts: list[list[str]]) -> list[Episode]:
    factory = load_environment("lookup_chain", {}, servers={"notes": section})
    limits = {"max_tokens_per_turn": 200, "tool_timeout_s": 60.0}
    config = RunConfig.model_validate({"rollout": limits, "context": {"max_tokens": 8000}})
    assert factory.example is not None
    return list(run_episodes(scripted_actors(factory, scripts), [factory.example] * len(scripts), config))


@pytest.mark.parametrize("count", [2, pytest.param(64, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
def test_parallel_episodes_share_no_state_and_leave_no_process(count: int) -> None:
    keep = [call("keep", f'{{"text": "of {number}"}}') for number in range(count)]
    more = call("keep", '{"text": "more"}')
    episodes = play(
        program(tools=("keep", "kept", "child")), [[first, more, call("kept"), call("child"), "done"] for first in keep]
    )
    for number, episode in enumerate(episodes):
        assert shown(episode)[:3] == ["1", "2", f"of {number}\nmore"]
    started = [int(pid) for episode in episodes for pid in shown(episode)[3].split()]
    assert len(set(started)) == 2 * count
    assert [pid for pid in started if not ended(pid)] == []


# What a configuration says of them


def refusal(**servers: McpServerSection) -> str:
    return refusal_of(load_environment, "lookup_chain", {}, servers=servers)


def python(code: str, **settings: Any) -> McpServerSection:
    return McpServerSection(command=(sys.executable, "-S", "-c", code), **settings)


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (
            McpServerSection(command=("no-such-program", "x")),
            " must be a server that lists its tools, got 'no-such-program x' with: FileNotFoundError: there is no ",
        ),
        (python("import sys; sys.exit('no notes here')"), "with: no notes here. Try it by hand."),
        (python("import time; time.sleep(600)", start_timeout_s=0.3), "with: no answer within start_timeout_s=0.3 s. "),
        (McpServerSection(url="http://127.0.0.1:9/mcp"), "got 'http://127.0.0.1:9/mcp' with: ConnectError: "),
        (python("", pass_env=("NO_SUCH",)), ".pass_env must name variables that are set, got 'NO_SUCH'."),
    ],
)
def test_server_that_can_not_be_asked_is_one_error_with_what_it_said(section: McpServerSection, problem: str) -> None:
    said = refusal(notes=section)
    assert said.startswith("environment.mcp_servers.notes") and problem in said


def test_tools_of_several_servers_have_names_of_their_own_and_belong_to_the_source(url: str) -> None:
    some = McpServerSection(url=url, tools=("keep", "fail"))
    assert refusal(a=some, b=McpServerSection(url=url, tools=("fail",))) == (
        "environment.mcp_servers.b must offer tools with names of their own, got 'fail', which is also one of "
        "environment.mcp_servers.a. Name those to offer with environment.mcp_servers.b.tools."
    )
    found = refusal(a=McpServerSection(url=url, tools=("fails",)))
    assert found == "environment.mcp_servers.a.tools must be names of its tools, got 'fails'. Did you mean fail?"
    both = {"a": some, "b": McpServerSection(url=url, tools=("say",))}
    factories = [load_environment("lookup_chain", {}, servers=servers) for servers in ({}, {"a": some}, both)]
    assert [tool["function"]["name"] for tool in factories[2].tools] == ["lookup", "keep", "fail", "say"]
    assert len({factory.source for factory in factories}) == 3
