"""Held-out episodes that workers run: the policy is judged where its environment is."""

from __future__ import annotations

from agentloop.rollouts.evaluation import Evaluation, Outcome, attempts_of
from agentloop.training.collecting.issued_batches import issue_groups
from agentloop.training.collecting.waiting import Waiting
from agentloop.training.components import Components
from replay.ticket_records import EVALUATION


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
    return Evaluation(tuple(attempts), section.samples, lost)
