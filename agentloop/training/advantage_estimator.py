"""Computes advantages by the configuration, for collected groups and for batches with replayed rows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from agentloop.algorithms.advantages import (
    ReplayBaseline,
    advantages_for_members,
    compared_members,
    normalise_batch,
)
from agentloop.algorithms.catalog import ALGORITHMS, algorithms_where
from agentloop.algorithms.credit import over_tokens, relative_turn_rewards, turn_advantages
from agentloop.algorithms.declarations import Member
from agentloop.config import RunConfig
from agentloop.errors import UserError
from agentloop.learning.batch import member_of, members_of
from agentloop.learning.own_algorithm import load_own_advantage
from agentloop.records import TurnRewards
from context.messages import canonical_json
from context.tokens.loss_mask import response_mask
from context.tokens.session_segments import sequences_of
from replay.records import FRESH, BatchRow, Trajectory

_ONE_REWARD = " or ".join(algorithms_where(lambda algorithm: not algorithm.several_agents))


class AdvantageEstimator:
    def __init__(self, config: RunConfig, turn_rewards: TurnRewards | None = None) -> None:
        """Credit per turn needs `turn_rewards`. Raises UserError for an unusable `advantage.function`."""
        self._config, self._turn_rewards = config, turn_rewards
        self._authors = config.context.author_table()
        # With a critic, members are compared only for the stored advantages.
        self._algorithm = ALGORITHMS[ALGORITHMS[config.algorithm].stored_as or config.algorithm]
        spec = config.advantage.function
        self._own = None if spec is None else load_own_advantage(spec)

    def advantages_for_groups(
        self, rows: Sequence[Trajectory], rewards: Sequence[float], greedy: Mapping[str, float] | None = None
    ) -> list[Trajectory]:
        """Set the advantages that are stored with whole groups, including those of agents with their own rewards.

        The KL penalty is already taken from `rewards`. `greedy` are rewards of greedy episodes by task.
        """
        known, pairs = greedy or {}, list(zip(rows, rewards, strict=True))
        members = [replace(member_of(row, r), greedy_reward=known.get(row.record.task, math.nan)) for row, r in pairs]
        own = self._advantages_for_agents([BatchRow(row, reward=reward) for row, reward in pairs], "stored")
        found = []
        for row, advantage, agents in zip(rows, self._advantages(members, "stored"), own, strict=True):
            said = {name: (row.record.rewards_by_agent[name][0], value) for name, value in agents.items()}
            text = canonical_json(said) if said else None
            found.append(replace(row, record=replace(row.record, advantage=advantage, agent_rewards=text)))
        return found

    def _advantages_for_agents(self, rows: Sequence[BatchRow], baseline: ReplayBaseline) -> list[dict[str, float]]:
        """Compute advantages of agents with their own rewards, by row and name.

        An agent is compared with the same agent of the trajectories that its trajectory is compared with. A KL penalty
        lowers each agent's reward like the trajectory's.
        """
        known, members = [row.trajectory.record.rewards_by_agent for row in rows], members_of(rows)
        found: list[dict[str, float]] = [{} for _ in rows]
        config, names = self._config, sorted({name for each in known for name in each})
        changed = config.advantage.normalise_batch != "none" or config.advantage.credit != "trajectory"
        if names and (changed or not ALGORITHMS[config.algorithm].several_agents):
            raise UserError(
                f"environment.agent must give one reward for the episode under algorithm {_ONE_REWARD}, "
                "advantage.normalise_batch or advantage.credit turn, got a reward for the agent "
                f"{names[0]}. Return one reward, or begin a new run with other settings."
            )
        for agent in names:
            at = [place for place, each in enumerate(known) if agent in each]
            charged = [members[place].reward - rows[place].trajectory.record.reward for place in at]
            own = [replace(members[p], reward=known[p][agent][0] + less) for p, less in zip(at, charged, strict=True)]
            for place, value in zip(at, self._advantages(own, baseline), strict=True):
                found[place][agent] = value
        return found

    def advantages_for_batch(
        self, rows: Sequence[BatchRow], baseline: ReplayBaseline
    ) -> tuple[list[BatchRow], dict[str, float]]:
        """Set the advantages to train with; returns the rows, and metrics.

        The steps are: baseline (`stored`: a row's own), batch normalisation, turns, agents.
        """
        metrics: dict[str, float] = {}
        if baseline != "stored":
            members = members_of(rows)
            found = self._advantages(members, baseline)
            rows = [replace(row, advantage=value) for row, value in zip(rows, found, strict=True)]
            others = [set(found) - {place} for place, found in enumerate(self._compared_positions(members, baseline))]
            metrics["replay/without_peers"] = sum(m.replayed and not o for m, o in zip(members, others, strict=True))
        rows = self._normalise(rows)
        if self._config.advantage.credit == "turn":
            turns = self._credit_turn_rewards(rows, baseline)
            rows = [self._spread_turns(row, values) for row, values in zip(rows, turns, strict=True)]
            metrics["advantage/unknown_turns"] = sum(row.token_advantages is None for row in rows)
        if baseline == "stored":
            stored = [row.trajectory.record.rewards_by_agent for row in rows]
            own = [{name: advantage for name, (_, advantage) in agents.items()} for agents in stored]
        else:
            own = self._advantages_for_agents(rows, baseline)
        rows = [_spread_agents(row, agents) if agents else row for row, agents in zip(rows, own, strict=True)]
        return rows, {name: float(value) for name, value in metrics.items()}

    def _compared_positions(self, members: Sequence[Member], baseline: ReplayBaseline) -> list[tuple[int, ...]]:
        return compared_members(members, baseline, whole_batch=self._algorithm.compares == "batch")

    def _advantages(self, members: Sequence[Member], baseline: ReplayBaseline) -> list[float]:
        if self._own is None:
            return advantages_for_members(members, baseline, self._algorithm)
        result = [0.0] * len(members)
        for positions in dict.fromkeys(others for others in self._compared_positions(members, baseline) if others):
            given = self._own([members[p] for p in positions])
            for position, value in zip(positions, given, strict=True):
                result[position] = value
        return result

    def _normalise(self, rows: Sequence[BatchRow]) -> list[BatchRow]:
        kind = self._config.advantage.normalise_batch
        if kind == "none":
            return list(rows)
        # Where groups are compared, an advantage of 0 means that there is no signal; otherwise it is a measured value.
        measured = self._own is None and self._algorithm.compares != "group"
        given, fresh = [row.advantage for row in rows], [row.stream == FRESH for row in rows]
        values = normalise_batch(given, fresh, centre=kind == "whiten", zero_is_measured=measured)
        return [replace(row, advantage=value) for row, value in zip(rows, values, strict=True)]

    def _credit_turn_rewards(self, rows: Sequence[BatchRow], baseline: ReplayBaseline) -> list[list[float]]:
        """Compute the advantages of each row's turns; empty if its turn rewards are unknown."""
        assert self._turn_rewards is not None
        section = self._config.advantage
        members = members_of(rows)
        turn_rewards = self._turn_rewards([row.trajectory for row in rows])
        known = [replace(member, turn_rewards=turns) for member, turns in zip(members, turn_rewards, strict=True)]
        compared = self._compared_positions(known, baseline)
        result: list[list[float]] = []
        for position, (row, member) in enumerate(zip(rows, known, strict=True)):
            others = [p for p in compared[position] if not (self._algorithm.leaves_itself_out and p == position)]
            among, centre = [known[p] for p in others], self._algorithm.compares != "nothing"
            terms = relative_turn_rewards(member, among, centre=centre, normalise_std=self._algorithm.divides)
            result.append(turn_advantages(row.advantage, terms, gamma=section.turn_gamma, coef=section.turn_coef))
        return result

    def _spread_turns(self, row: BatchRow, values: Sequence[float]) -> BatchRow:
        """The row with its turns' advantages on their tokens; unchanged where they are not known."""
        segments = row.trajectory.segments
        masks = [response_mask(segment.tokens, self._authors) for segment in segments]
        is_main = [segment.reason != "fork" for segment in segments]  # a fork holds a strategy's question
        return replace(row, token_advantages=over_tokens(masks, is_main, values, outcome=row.advantage))


def _spread_agents(row: BatchRow, advantages: Mapping[str, float]) -> BatchRow:
    """Put each agent's advantage on the replies to its requests, and the row's own on other replies."""
    nodes = row.trajectory.nodes
    values = [np.float32(advantages.get(node.agent, row.advantage)) for node in nodes]
    paths = sequences_of(nodes).values()
    tokens = [np.repeat([values[at] for at, _ in path], [count for _, count in path]) for path in paths]
    return replace(row, token_advantages=tuple(tokens))
