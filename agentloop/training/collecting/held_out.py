"""Held-out episodes: kept to be looked at; and those that workers run, where the policy's environment is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.evaluation import Evaluation, Outcome, attempts_of, held_out_episode
from agentloop.training.collecting.issued_batches import issue_groups
from agentloop.training.collecting.waiting import Waiting
from agentloop.training.components import Components
from replay.ticket_records import EVALUATION


def keep_episodes(components: Components, iteration: int, episodes: Sequence[tuple[int, Episode]]) -> None:
    """Those of the evaluation after this iteration, by their places, go where no draw knows of them.

    Their messages go through `replay.redact` as all that is stored does. Only the newest evaluations' are kept.
    """
    config, redact = components.config, components.redact
    kept = []
    for number, episode in episodes if config.evaluation.keep_episodes else ():
        record = held_out_episode(
            components.actors, episode, config, run=components.run_id, iteration=iteration, number=number
        )
        if redact is not None:
            record = replace(record, messages=tuple(redact(record.messages) or ()))
        kept.append(record)
    components.store.keep_held_out(components.run_id, kept, evaluations=config.evaluation.keep_episodes)


def evaluate_by_workers(components: Components, waiting: Waiting, iteration: int) -> Evaluation:
    """`evaluation.samples` episodes on each held-out task, before any that is trained on."""
    section, store, run = components.config.evaluation, components.store, components.run_id
    tasks = components.source.held_out(section.tasks)
    numbers = issue_groups(components, [(task, section.samples) for task in tasks], iteration, EVALUATION)
    waiting.until_ended(iteration, EVALUATION)
    attempts, lost = [], 0
    groups, version = store.tickets.ended_groups(run, EVALUATION), components.generator.policy_version
    store.tickets.close_groups(run, [group.number for group in groups], {}, policy_version=version)
    for group in groups:
        outcomes = [Outcome(**member.outcome) for member in group.members if member.outcome is not None]
        if group.number in numbers:
            lost += len(group.members) - len(outcomes)
            task = tasks[group.number - numbers.start]
            attempts += [attempts_of(task, outcomes)] if outcomes else []
    keep_episodes(components, iteration, ())  # the workers have stored them
    return Evaluation(tuple(attempts), section.samples, lost)
