"""Turns ends of failed episodes into successes at other tasks (Andrychowicz et al. 2017, arXiv 1707.01495).

Example: an episode was asked for the code of "oak" and answered with the code of "elm", after two lookups that began
at "elm". These lookups and the answer become a row of the task "What is the code of elm?".
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentloop.config import RunConfig
from agentloop.environments import Achieved
from agentloop.rollouts.actors import Actors
from agentloop.rollouts.episodes.episode import open_context
from agentloop.rollouts.episodes.run_episodes import new_context
from agentloop.rollouts.stored_episodes import StoredEpisode, StoredEpisodes, sampled_replies
from agentloop.rollouts.trajectories import Collected, num_user_turns, task_record
from context import ContextManager
from context.authors import LLM
from context.messages import Message, content_hash
from context.tokens.token_sequence import Segment
from replay.records import ELIGIBLE, HINDSIGHT, WHOLE_ENDS, Trajectory, group_of
from replay.storage.validate import summarised


@dataclass(frozen=True)
class Hindsight:
    """Asks the environment which other tasks failed episodes solved, and accepts those that its reward confirms."""

    actors: Actors
    config: RunConfig
    episodes: StoredEpisodes
    held_out: Collection[str]
    """Hashes of held-out payloads, which no row's task may have."""

    def relabel(self, rows: Sequence[Trajectory], *, iteration: int, attempt: int) -> Collected:
        """Make a row for each task that one of `rows` solved in hindsight, in the iteration's places after `rows`.

        Only failed episodes that ended with an answer and made no wrong call are used. `attempt` is the number of
        times that the run was resumed.
        """
        found, claimed = Collected(), 0
        failed = [row for row in rows if _may_have_solved_another(row)]
        for row, episode in zip(failed, self.episodes.find(failed), strict=True):
            if episode is None:
                continue
            last = len(episode.turns) - self.config.replay.hindsight.min_turns
            factory = self.actors.environments.factory_for(episode.task)
            solved = factory.achieved(episode.task, episode.messages)
            for achieved in (one for one in solved if one.first_turn <= last):
                claimed += 1
                slot = len(rows) + len(found.trajectories)
                place = replace(row.record, iteration=iteration, slot=slot, member=0, attempt=attempt)
                made = self._row(replace(row, record=place), episode, achieved)
                if made is not None:
                    found.tasks.append(task_record(factory, achieved.task))
                    found.groups.append(group_of([made]))
                    found.trajectories.append(made)
        found.extra_metrics = {"hindsight/claimed": float(claimed), "hindsight/rows": float(len(found.trajectories))}
        return found

    def _row(self, row: Trajectory, episode: StoredEpisode, achieved: Achieved) -> Trajectory | None:
        """Make the row in the place of `row`; None if the task is held out or not solved, or the tokens don't fit."""
        environments, task = self.actors.environments, achieved.task
        if content_hash(task.payload) in self.held_out:
            return None
        context = self._rebuilt(row, episode, achieved)
        if context is None:
            return None
        reward = environments.factory_for(task).reward(task, context.messages)
        if reward < self.config.rollout.success_reward:
            return None
        name = environments.task_hash(task)
        place = (row.id, row.record.attempt, HINDSIGHT, name, achieved.first_turn)
        id = hashlib.sha256("/".join(map(str, place)).encode()).hexdigest()[:32]
        following = context.messages[len(task.messages()) :]
        record = replace(
            row.record,
            id=id,
            group=f"{id}-group",
            task=name,
            source=HINDSIGHT,
            reward=reward,
            success=True,
            advantage=self.config.replay.hindsight.advantage,
            num_turns=sum(message.author == LLM for message in following),
            num_tool_calls=sum(message.role == "tool" for message in following),
            num_user_turns=num_user_turns(following),
            mean_entropy=None,
            content_hash="",
            parent=row.id,
            agent_rewards=None,
            state=ELIGIBLE,
        )
        segments = tuple(map(_without_log_probs, context.segments()))
        return summarised([Trajectory(record, segments, context.messages)], self.actors.authors)[0]

    def _rebuilt(self, row: Trajectory, episode: StoredEpisode, achieved: Achieved) -> ContextManager | None:
        """Rebuild the new task's conversation from the sampled tokens; None if they give another conversation."""
        turns, replies = episode.turns, sampled_replies(row.segments, self.actors.authors)
        if len(replies) != len(turns):
            return None
        context = new_context(self.actors, self.config, achieved.task)
        factory = self.actors.environments.factory_for(achieved.task)
        tools = factory.tools_for(achieved.task)
        open_context(context, achieved.task, tools, asked_by=f"{factory.where}.achieved")
        kept = list(zip(turns, replies, strict=True))[achieved.first_turn :]
        for number, ((said, *following), tokens) in enumerate(kept, 1):
            if context.question is not None or len(tokens) > context.room:
                return None
            reply = context.record_reply(
                tokens.token_ids.tolist(),
                tokens.behavior_log_probs.tolist(),
                policy_version=tokens.policy_versions.tolist(),
            ).message
            if _words(reply) != _words(said):
                return None
            answers = _renumbered(following, said, reply)
            if number == len(kept):
                context.end(answers)  # what was said after the end of the episode, which no prompt showed
            elif answers and context.observe(answers) is not None:
                return None
        return context


def _may_have_solved_another(row: Trajectory) -> bool:
    record = row.record
    if record.success or record.error_kinds is not None:
        return False
    plain = all(segment.behavior_context == "plain" for segment in row.segments)
    return plain and record.stop_reason in WHOLE_ENDS


def _words(reply: Message) -> tuple[object, ...]:
    """Return the content of a reply without the ids of its calls."""
    return reply.content, reply.reasoning, [(call.name, call.arguments) for call in reply.tool_calls]


def _renumbered(results: Sequence[Message], said: Message, again: Message) -> list[Message]:
    """Replace the call ids of tool results: `again` has the same calls as `said`, with other ids."""
    numbers = {old.id: new.id for old, new in zip(said.tool_calls, again.tool_calls, strict=True)}
    return [replace(result, tool_call_id=numbers.get(result.tool_call_id, result.tool_call_id)) for result in results]


def _without_log_probs(segment: Segment) -> Segment:
    """Remove a segment's log-probs, because they belong to another context."""
    unknown = np.full(len(segment.tokens), np.nan, np.float32)
    tokens = replace(segment.tokens, behavior_log_probs=unknown)
    return replace(segment, tokens=tokens, behavior_context="relabelled")
