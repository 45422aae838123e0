"""Agents with clients of their own learn by what they ask: from the commands of their page to rows of exact tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from context import default_authors
from context.authors import LLM
from examples.gateway_agents import make_data
from replay.store import ReplayStore
from tests.docs.test_blocks import checkout, typed
from tests.fakes.runs import rows
from tests.soak.test_quickstart import worst_log_prob_error

pytestmark = pytest.mark.slow

FOLDER = "examples/gateway_agents"
AGENTS = ("openai_loop", "anthropic_loop", "pydantic_agent", "lead_with_scouts")
SMALL = (
    *("run.iterations=2", "batch.trajectories=16", "batch.group_size=4", "batch.mini_batch=8"),
    *("evaluation.tasks=4", "checkpoint.keep_policies=all", "replay.successful_only=false"),
)


def demonstrate(agent: str, folder: Path, episodes: int, patch: pytest.MonkeyPatch) -> None:
    data = [f"--agent={FOLDER}/{agent}.py:solve", f"--demonstrations={episodes}", "--tasks=40"]
    patch.chdir(folder)
    patch.setattr("sys.argv", ["make_data", "runs/gateway_agents", *data])
    make_data.main()


@pytest.fixture(scope="module", params=AGENTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where somebody stands who has trained one of the agents for two iterations; only tests read its run."""
    folder = checkout(tmp_path_factory.mktemp(request.param) / request.param)
    agent = f"environment.agent={FOLDER}/{request.param}.py:solve"
    with pytest.MonkeyPatch.context() as patch:
        demonstrate(request.param, folder, 20 if request.param == "lead_with_scouts" else 120, patch)
        sets = [part for setting in (*SMALL, agent) for part in ("--set", setting)]
        assert typed(["agentloop", "sft", f"{FOLDER}/sft.yaml", "--set", "sft.epochs=3"], folder, patch) == 0
        start = "model.path=runs/gateway-agents-sft-001/model"
        assert typed(["agentloop", "train", f"{FOLDER}/train.yaml", *sets, "--set", start], folder, patch) == 0
    yield folder


def test_every_sampled_token_is_trained_once_with_its_log_prob(folder: Path) -> None:
    run = folder / "runs/gateway-agents-001"
    authors = default_authors()
    with ReplayStore.open(run / "replay.sqlite", read_only=True) as store:
        trajectories = store.read([id for (id,) in rows(run / "replay.sqlite", "select id from trajectories")])
    assert {(row.source, row.stop_reason) for row in trajectories} <= {("gateway", "answered")}
    for row in trajectories:
        sampled = [node.tokens.part(len(node.tokens) - node.num_sampled, len(node.tokens)) for node in row.nodes]
        trained = [
            segment.tokens.token_ids[segment.tokens.authors == authors.code(LLM)].tolist() for segment in row.segments
        ]
        assert sorted(sum(trained, [])) == sorted(id for part in sampled for id in part.token_ids.tolist())
    assert worst_log_prob_error(run) < 1e-4
