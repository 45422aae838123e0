"""A ticket that has ended two workers is run by itself: others have lost no try by it."""

from __future__ import annotations

from agentloop.workers.claims import HeldClaims
from replay.records import TaskRecord
from replay.ticket_records import Claim, TicketRecord


def claim(number: int, tries: int) -> Claim:
    return Claim(TicketRecord("run", number, 0, "task", 1), TaskRecord("task", "here", {}), "me", tries, tries)


def test_a_ticket_in_its_last_try_waits_until_nothing_else_is_held() -> None:
    held = HeldClaims(4)
    assert held.wanted == 4
    last = claim(2, 3)
    taken, returned = held.add([claim(0, 1), claim(1, 2), last])
    assert ([each.place for each in taken], returned) == ([(0, 0), (1, 0)], [last])
    assert held.wanted == 0
    held.drop([(0, 0), (1, 0)])
    assert held.wanted == 1
    assert held.add([last]) == ([last], [])
    assert (held.wanted, len(held)) == (0, 1)
    held.drop([last.place])
    assert (held.wanted, len(held)) == (4, 0)


def test_of_several_in_their_last_try_one_is_taken() -> None:
    held = HeldClaims(4)
    taken, returned = held.add([claim(0, 3), claim(1, 3)])
    assert ([each.place for each in taken], [each.place for each in returned]) == ([(0, 0)], [(1, 0)])
    assert held.wanted == 0


def test_a_worker_that_made_room_for_nothing_claims_on() -> None:
    held = HeldClaims(4)
    held.add([claim(0, 1), claim(1, 3)])
    held.drop([(0, 0)])
    assert held.wanted == 1
    held.add([claim(5, 1)])
    assert held.wanted == 3
