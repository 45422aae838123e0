"""Fresh groups that begin inside stored successes of the run, each member behind the same first replies.

The replies that are kept are nearly all of them at first, and fewer the more often episodes succeed from there: the
reverse curriculum of R3 (Xi et al. 2024, arXiv 2402.05808), of what the policy found itself (as CRPS, ACL 2026).
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
    """Finds where groups can begin, by what buffer and checkpoint have alone: a resumed run goes on alike."""

    episodes: StoredEpisodes
    authors: AuthorTable
    held_out: Collection[str]
    """Hashes of the payloads that no group's task may have."""

    def choose(self, run: str, count: int, *, without: Collection[str] = ()) -> list[Restart]:
        """At most `count`, each inside another success: see `restartable`."""
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
        """Nothing where its task is held out or of another environment, its replies can't be told apart, or a tool that
        would be called again failed: it may answer now."""
        (row,) = self.episodes.store.read([id])
        (episode,) = self.episodes.of([row])
        if episode is None or content_hash(episode.task.payload) in self.held_out:
            return []
        replies, turns = sampled_replies(row.segments, self.authors), episode.turns
        if len(replies) != len(turns):
            return []
        if repeats(self.episodes.environments.of(episode.task).environment):
            kinds = {message.error_kind for turn in turns[:kept] for message in turn}
            if not kinds <= {None, *POLICY_ERRORS}:
                return []
        first = tuple(map(KeptTurn, replies[:kept], turns[:kept]))
        return [Restart(**vars(episode.task), hash=row.record.task, parent=id, turns=first)]
