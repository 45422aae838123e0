"""Agents with clients of their own learn by what they ask: from the commands of their page to rows of exact tokens."""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from context import TokenSequence, default_authors
from context.authors import LLM
from context.tokens.session_nodes import Node, conversation_of
from examples.gateway_agents import make_data
from replay.records import Trajectory
from replay.store import ReplayStore
from tests.docs.test_blocks import checkout, typed
from tests.fakes.runs import rows
from tests.soak.test_quickstart import worst_log_prob_error

pytestmark = pytest.mark.slow

EXAMPLES = "examples/gateway_agents"
EPISODES = {"openai_loop": 100, "anthropic_loop": 100, "pydantic_agent": 100, "lead_with_scouts": 40}
"""Of a colleague's, from which a model learns to call a tool at all."""
SMALL = (
    *("run.iterations=2", "batch.trajectories=16", "batch.group_size=4", "batch.mini_batch=8"),
    *("replay.successful_only=false", "replay.sampler=uniform", "evaluation.tasks=4", "checkpoint.keep_policies=all"),
)
RUN = "runs/gateway-agents-001"
RETRIED = ("lead", "retry")


@pytest.fixture(scope="module", params=EPISODES)
def agent(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def run(agent: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two iterations of one of the agents, begun in the folder of a checkout."""
    folder, solve = checkout(tmp_path_factory.mktemp(agent) / "checkout"), f"{EXAMPLES}/{agent}.py:solve"
    settings = (*SMALL, f"environment.agent={solve}", "model.path=runs/gateway-agents-sft-001/model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        data = ["make_data", "--agent", solve, "--demonstrations", str(EPISODES[agent]), "--tasks", "40"]
        patch.setattr("sys.argv", data)
        make_data.main()
        assert typed(["agentloop", "sft", f"{EXAMPLES}/sft.yaml"], folder, patch) == 0
        sets = [part for setting in settings for part in ("--set", setting)]
        assert typed(["agentloop", "train", f"{EXAMPLES}/train.yaml", *sets], folder, patch) == 0
    return folder / RUN


def stored(run: Path) -> list[Trajectory]:
    with closing(ReplayStore.open(run / "replay.sqlite", read_only=True)) as store:
        return list(store.read([id for (id,) in rows(run / "replay.sqlite", "select id from trajectories")]))


def said(parts: Sequence[TokenSequence]) -> Counter[tuple[int, float]]:
    """Tokens of the policy's, with their log-probs."""
    llm = default_authors().code(LLM)
    return Counter(
        pair
        for part in parts
        for pair in zip(
            part.token_ids[part.authors == llm].tolist(),
            part.behavior_log_probs[part.authors == llm].tolist(),
            strict=True,
        )
    )


def test_each_sampled_token_is_trained_once_with_the_log_prob_of_its_policy(run: Path) -> None:
    trajectories = stored(run)
    assert len(trajectories) == 16 + 12
    for row in trajectories:
        assert (row.record.source, row.record.stop_reason) == ("gateway", "answered")
        assert said([segment.tokens for segment in row.segments]) == said([node.tokens for node in row.nodes])
        assert sum(said([node.tokens for node in row.nodes]).values()) == sum(node.num_sampled for node in row.nodes)
    assert worst_log_prob_error(run) < 1e-4


def ordinary(node: Node) -> bool:
    """Whether a reply is of the kind that agents send back as it was: whole, not empty, and without control tokens."""
    said = node.messages[-1]
    return node.num_sampled < 32 and bool(said.content or said.tool_calls) and "<|" not in repr(said)


def test_a_sub_agent_and_a_summary_are_branches_and_nothing_else_is(agent: str, run: Path) -> None:
    trajectories = [row for row in stored(run) if all(map(ordinary, row.nodes))]
    nodes = [node for row in trajectories for node in row.nodes]
    assert {node.status for node in nodes} == {"trained"}
    forks = {(node.agent, node.place.fork) for node in nodes}
    if agent == "lead_with_scouts":
        branches = {("lead", "new"), ("lead", "edited"), ("scout", "new"), ("scout", "edited")}
        # A scout may be sent to a key again, and a lead may go on from the same summary again.
        again = [(row, node) for row in trajectories for node in row.nodes if (node.agent, node.place.fork) == RETRIED]
        assert all(conversation_of(row.nodes, node.number)[2].role == "user" for row, node in again)
        assert forks - {("scout", "retry"), RETRIED} == {("lead", None), ("scout", None), *branches}
    else:
        assert forks == {("", "new"), ("", None)}
        assert {len(row.segments) for row in trajectories} == {1}


def test_a_quarter_of_an_update_is_replayed(run: Path) -> None:
    drawn = "select iteration, count(*) from draws where stream = 'replay' group by iteration"
    assert rows(run / "replay.sqlite", drawn) == [(2, 4)]


def test_is_shown_and_resumed(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    longest = max(stored(run), key=lambda row: len(row.segments))
    assert typed(["agentloop", "replay", "show", longest.id, str(run)], run.parent, monkeypatch) == 0
    assert capsys.readouterr().out.count("segment ") >= len(longest.segments)
    further = ["--resume", "--set", "run.iterations=3"]
    assert typed(["agentloop", "train", str(run), *further], run.parent, monkeypatch) == 0
    assert rows(run / "replay.sqlite", "select count(*) from iterations") == [(3,)]
