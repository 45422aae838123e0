"""Begins fresh groups inside stored successes of the run; each member continues after the same first replies.

At first nearly all replies of the success are repeated. The more often episodes succeed from there, the fewer: the
reverse curriculum of R3 (Xi et al. 2024, arXiv 2402.05808), on the policy's own successes (as CRPS, ACL 2026).
"""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from agentloop.environments import POLICY_ERRORS
from agentloop.environments.tools.tool_memory import repeats
from agentloop.rollouts.episodes.restart import KeptTurn, Restart
from agentloop.rollouts.stored.stored_episodes import StoredEpisodes, sampled_replies
from context import AuthorTable
from context.messages import content_hash
from replay.errors import ContentGone, CorruptTrajectory
from replay.sampling.restart_curriculum import restartable


@dataclass(frozen=True)
class RestartFinder:
    """Finds places where groups can begin, from buffer and checkpoint alone, so that a resumed run finds the same."""

    episodes: StoredEpisodes
    authors: AuthorTable
    held_out: Collection[str]
    """Hashes of held-out payloads, which no group's task may have."""

    def choose(self, run: str, count: int, *, without: Collection[str] = ()) -> list[Restart]:
        """Choose at most `count` restarts, each inside another success; see `restartable`."""
        with self.episodes.store.reading() as connection:
            successes = restartable(connection, run)
        found: list[Restart] = []
        for id, kept in successes:
            if len(found) == count:
                break
            with suppress(CorruptTrajectory, ContentGone):
                found += [] if id in without else self.behind(id, kept)
        return found

    def behind(self, id: str, kept: int) -> list[Restart]:
        """Make the restart after the first `kept` replies of a success; empty where none is possible.

        The task must not be held out or belong to another environment, and the replies must be separable. No tool that
        would be called again may have failed, because it may succeed now.
        """
        (row,) = self.episodes.store.read([id])
        (episode,) = self.episodes.find([row])
        if episode is None or content_hash(episode.task.payload) in self.held_out:
            return []
        replies, turns = sampled_replies(row.segments, self.authors), episode.turns
        if len(replies) != len(turns):
            return []
        if repeats(self.episodes.environments.factory_for(episode.task).environment):
            kinds = {message.error_kind for turn in turns[:kept] for message in turn}
            if not kinds <= {None, *POLICY_ERRORS}:
                return []
        first = tuple(map(KeptTurn, replies[:kept], turns[:kept]))
        return [Restart(**vars(episode.task), hash=row.record.task, parent=id, turns=first)]
