"""Agents of one episode with rewards of their own: each is compared with the same agent of its group."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentloop.config import RunConfig
from agentloop.errors import UserError
from agentloop.learning.batch import build_batch
from agentloop.training.advantage_estimator import AdvantageEstimator
from context.messages import canonical_json
from context.tokens.session_nodes import Fork, Node, Place, Status
from context.tokens.session_segments import segments_of
from replay.records import BatchRow, Trajectory
from tests.agentloop.learning.test_passes import written_formula
from tests.fakes.batch_rows import AUTHORS, batch_row, row, segment
from tests.fakes.tiny_actors import LOSS, gradients, rescore, run_config, tiny_actor


def session(name: str, reward: float, scout: float | None, *, seed: int = 0) -> Trajectory:
    """A lead, its scout, and the lead again; `scout`: what the scout is given apart."""

    def node(number: int, authors: str, agent: str, parent: int | None, kept: int, fork: Fork | None) -> Node:
        tokens = segment(authors, seed=10 * seed + number).tokens
        place = Place(parent, kept, 0, "tools", fork)
        return Node(number, place, tokens, authors.count("l"), (), Status.TRAINED, agent)

    nodes = (
        node(0, "uull", "", None, 0, Fork.NEW),
        node(1, "ulll", "scout", None, 0, Fork.NEW),
        node(2, "el", "", 0, 4, None),
    )
    made = row(name, *segments_of(nodes, AUTHORS)).trajectory
    own = None if scout is None else canonical_json({"scout": (scout, 0.0)})
    return replace(made, record=replace(made.record, reward=reward, agent_rewards=own), nodes=nodes)


def estimator(algorithm: str = "dr_grpo", **sections: Any) -> AdvantageEstimator:
    return AdvantageEstimator(RunConfig.model_validate({"algorithm": algorithm, **sections}))


def stored(made: AdvantageEstimator, rows: list[Trajectory], charged: float = 0.0) -> list[Trajectory]:
    return made.advantages_for_groups(rows, [row.record.reward - charged for row in rows])


def batched(rows: list[Trajectory], stream: str = "fresh") -> list[BatchRow]:
    return [batch_row(r, stream, advantage=r.record.advantage, reward=r.record.reward) for r in rows]


GROUP = [session("a", 1.0, 0.25), session("b", 0.0, 0.75, seed=1), session("c", 0.5, None, seed=2)]


@pytest.mark.parametrize("stream", ["fresh", "replay"])
def test_tokens_have_the_advantage_of_the_agent_that_sampled_them(stream: str) -> None:
    # The leads: 1, 0 and 0.5, less 0.5. The scouts: 0.25 and 0.75, less 0.5; the third has the trajectory's, 0.
    rows = stored(estimator(), GROUP)
    assert [row.record.advantage for row in rows] == [0.5, -0.5, 0.0]
    assert [row.record.rewards_by_agent for row in rows] == [{"scout": (0.25, -0.25)}, {"scout": (0.75, 0.25)}, {}]
    batch = build_batch(estimator().advantages_for_batch(batched(rows, stream), "stored")[0], AUTHORS)
    trained = [set(values[mask].tolist()) for values, mask in zip(batch.advantages, batch.loss_mask, strict=True)]
    assert trained == [{-0.25}, {0.5}, {0.25}, {-0.5}, {0.0}, {0.0}]  # the scout's sequence, then the lead's
    assert batch.num_trajectories == 3


def test_agents_are_measured_once_more_with_those_they_share_a_task_with() -> None:
    rows = batched(stored(estimator(), GROUP[:2]), "replay")
    rows = [*rows, *batched([session("d", 1.0, 0.5, seed=3)])]
    found, _ = estimator().advantages_for_batch(rows, "shared")
    scouts = [row.token_advantages[0][0] for row in found if row.token_advantages is not None]
    assert scouts == [-0.25, 0.25, 0.0]


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_loss_and_gradient_are_those_of_the_written_formula(aggregation: str) -> None:
    rng = np.random.default_rng(0)
    rewards, scouts = rng.normal(size=(2, 4))
    facts = enumerate(zip(rewards, scouts, strict=True))
    rows = stored(estimator("grpo"), [session(f"t{i}", float(r), float(s), seed=i) for i, (r, s) in facts], charged=0.5)
    for values, found in (
        (rewards, [made.record.advantage for made in rows]),
        (scouts, [made.record.rewards_by_agent["scout"][1] for made in rows]),
    ):
        expected = (values - values.mean()) / (values.std(ddof=1) + 1e-6)
        assert found == pytest.approx(expected.tolist(), rel=1e-9)
    mixed, _ = estimator("grpo").advantages_for_batch(batched(rows), "stored")
    actor, config = tiny_actor(seed=0), run_config(loss={**LOSS, "aggregation": aggregation})
    scored = rescore(actor, mixed, old=tiny_actor(seed=1))
    scored = replace(scored, batch=replace(scored.batch, advantages=scored.batch.advantages.double()))
    loss, gradient, _ = gradients(actor, scored, config)
    expected_loss, expected_gradient = written_formula(actor, scored, config)
    assert loss == pytest.approx(expected_loss, rel=1e-10)
    assert (gradient - expected_gradient).abs().max() <= 1e-10 * expected_gradient.abs().max()


@pytest.mark.parametrize("sections", [{"advantage": {"normalise_batch": "scale"}}, {"algorithm": "remax"}])
def test_settings_that_know_one_reward_alone_refuse_several(sections: dict[str, Any]) -> None:
    said = "must give one reward for the episode under .*, got a reward for the agent scout"
    with pytest.raises(UserError, match=said):
        stored(estimator(**{"algorithm": "grpo", **sections}), GROUP)
