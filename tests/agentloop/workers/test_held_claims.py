"""A ticket that has ended two workers is run by itself: others have lost no try by it."""

from agentloop.workers.worker import HeldClaims
from replay.records import TaskRecord
from replay.storage.collecting.ticket_records import Claim, TicketRecord


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
    assert held.add([last, claim(3, 3)]) == ([last], [claim(3, 3)])  # of several, one
    held.drop([last.place])
    held.add([claim(5, 1)])
    assert held.wanted == 3  # room was made, and it claims on
