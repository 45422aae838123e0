from collections.abc import Sequence
from typing import Any

from context.tokens.token_sequence import Segment
from replay import ReplayStore
from replay.records import Trajectory
from replay.storage.collecting.ticket_records import TRAIN, Claim, TicketRecord
from tests.fakes.records import RUN, SHORT, task, tokens, trajectory

LONG = 600.0
OVER = -1.0
"""Seconds of leases: one that no test lives to see the end of, and one that is over at once."""


def ticket(number: int, member: int = 0, *, iteration: int = 1, purpose: str = TRAIN) -> TicketRecord:
    return TicketRecord(RUN, number, member, "task-1", iteration, purpose)


def issue(store: ReplayStore, groups: Sequence[int], *, size: int = 2, purpose: str = TRAIN, iteration: int = 1) -> int:
    members = [ticket(n, m, iteration=iteration, purpose=purpose) for n in groups for m in range(size)]
    return store.tickets.issue([task()], members)


def claim(store: ReplayStore, holder: str = "w", *, count: int = 1, lease_s: float = LONG) -> list[Claim]:
    return store.tickets.claim(RUN, holder, count=count, lease_s=lease_s)


def episode(claim: Claim, *, version: int = 0, suffix: str = "", trained: bool = True, **changes: Any) -> Trajectory:
    given = claim.ticket
    reply = "llm" if trained else "env"
    sampled = tokens(list(SHORT.token_ids), ["template", "user", reply, reply, "env", reply], version=version)
    place = {"group": f"group-{given.number}", "iteration": given.iteration, "member": given.member}
    id = f"row-{given.number}-{given.member}{suffix}"
    return trajectory(id, segments=(Segment(sampled),), **{**place, "slot": given.number * 8 + given.member, **changes})


def collect(store: ReplayStore, count: int, *, version: int = 0) -> list[str]:
    claims = claim(store, count=count)
    rows = [episode(each, version=version) for each in claims]
    assert store.tickets.finish(list(zip(claims, rows, strict=True))) == [True] * len(claims)
    return [row.id for row in rows]


def close(store: ReplayStore, number: int, *, advantage: float = 0.25, version: int = 0) -> None:
    (group,) = [group for group in store.tickets.ended_groups(RUN) if group.number == number]
    ids = [member.trajectory for member in group.members if member.trajectory is not None]
    store.tickets.close_groups(RUN, [number], dict.fromkeys(ids, (advantage, None)), policy_version=version)


def state_of(store: ReplayStore, number: int, member: int = 0) -> tuple[Any, ...]:
    with store.reading() as connection:
        found = connection.exec_driver_sql(
            f"select state, holder, fence, tries, reason from tickets where number = {number} and member = {member}"
        )
        return tuple(found.one())
