"""What ended becomes rows and outcomes: each ticket ends in the transaction that stores what was collected for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.evaluation import held_out_episode, outcome_of
from agentloop.rollouts.trajectories import CollectedBy, MemberPlace, trajectory_of
from agentloop.workers.episodes_under_way import EpisodeResult
from agentloop.workers.joined_run import JoinedRun
from replay.errors import InvalidRecord
from replay.records import HeldOutEpisode, Trajectory
from replay.ticket_records import EVALUATION, Claim


def store_results(run: JoinedRun, results: Sequence[EpisodeResult]) -> Counter[str]:
    """How many counted as `done` and as `failed`. May be done again where it raised: what was stored counts once."""
    counts: Counter[str] = Counter()
    rows = []
    for result in results:
        if result.problem is not None:
            counts["failed"] += _fail(run, result.claim, result.problem)
        elif result.claim.ticket.purpose == EVALUATION:
            assert result.episode is not None  # only a problem has none
            outcome = asdict(outcome_of(result.episode, run.config))
            kept = _held_out(run, result.claim, result.episode) if run.config.evaluation.keep_episodes else None
            counts["done"] += run.store.tickets.finish_evaluation(result.claim, outcome, kept)
        else:
            rows.append((result.claim, row_of(run, result)))
    return counts + _finish(run, rows)


def _held_out(run: JoinedRun, claim: Claim, episode: Episode) -> HeldOutEpisode:
    ticket = claim.ticket
    number = ticket.number * run.config.evaluation.samples + ticket.member
    return held_out_episode(run.actors, episode, run.config, run=ticket.run, iteration=ticket.iteration, number=number)


def _finish(run: JoinedRun, rows: list[tuple[Claim, Trajectory]]) -> Counter[str]:
    try:
        return Counter(done=sum(run.store.tickets.finish(rows)))
    except InvalidRecord as error:
        if len(rows) == 1:
            return Counter(failed=_fail(run, rows[0][0], str(error)))
    # One of them can't be stored: the others can.
    return sum((_finish(run, [row]) for row in rows), Counter[str]())


def _fail(run: JoinedRun, claim: Claim, problem: str) -> int:
    return int(claim.place not in run.store.tickets.fail([claim], problem))


def row_of(run: JoinedRun, result: EpisodeResult) -> Trajectory:
    """A trajectory whose ids follow from its ticket's place, whichever worker collects it.

    The learner gives it its advantage when the group is closed.
    """
    assert result.episode is not None  # only a problem has none
    ticket = result.claim.ticket
    by = CollectedBy(ticket.run, ticket.iteration, attempt=0)
    place = MemberPlace(
        id=by.id_of("ticket", ticket.number, ticket.member),
        group=by.id_of("group", ticket.number),
        task=ticket.task,
        slot=ticket.number * run.config.batch.group_size + ticket.member,
        member=ticket.member,
    )
    return trajectory_of(run.actors, result.episode, result.reward, by, place, run.config)
