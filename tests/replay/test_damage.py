"""What is stored is damaged: a row at a time, or the file as a whole."""

from __future__ import annotations

import random
from contextlib import closing

import pytest

from context.messages import Message
from context.tokens import Segment
from replay.blobs import content_hash
from replay.databases import Location
from replay.records import Trajectory
from replay.sampling import make_sampler
from tests.replay.fakes import Born, new_store, request, sql, tokens, trajectory

BLOBS = ("token_ids", "authors", "behavior_log_probs", "policy_versions")
PAGE = 4096


def flip_bits(location: Location, chance: random.Random) -> None:
    """One bit of every row's tokens."""
    rows = sql(location, f"select trajectory, {', '.join(BLOBS)} from segments where position = 0 order by trajectory")
    for id, *blobs in rows:
        # Every bit of the row is as likely.
        field = chance.choices(range(4), [len(blob) for blob in blobs])[0]
        damaged = bytearray(blobs[field])
        bit = chance.randrange(8 * len(damaged))
        damaged[bit // 8] ^= 1 << bit % 8
        sql(location, f"update segments set {BLOBS[field]} = ? where trajectory = ?", bytes(damaged), id)


def check_flipped(location: Location, count: int) -> None:
    """F12: every flipped bit is found, or changes nothing that is read."""
    with closing(new_store(location)) as store:
        born = Born(1, rates=(0.5,) * (count // 4)).append_to(store)
        whole = {row.id: row for row in born.trajectories}
        flip_bits(location, random.Random(12))
        drawn = store.draw(request(2, count), make_sampler("uniform", 0))
        harmless = {row.trajectory.id for row in drawn}
        for row in drawn:
            assert content_hash(row.trajectory.segments) == content_hash(whole[row.trajectory.id].segments)
        states = sql(location, "select id, state, state_reason from trajectories")
        found = {id: reason for id, state, reason in states if state == "quarantined"}
        assert found.keys() | harmless == whole.keys() and not found.keys() & harmless
        # What zstd's frames may hold that nobody reads: unused bits of their descriptor.
        assert len(harmless) <= count / 20
        assert all(found.values())
        assert store.draw(request(3, 1), make_sampler("uniform", 0)) == [] or harmless


def test_flipped_bit_of_a_row_is_found(location: Location) -> None:
    check_flipped(location, 100)


@pytest.mark.soak
@pytest.mark.every_server
def test_flipped_bits_of_a_thousand_rows_are_found(location: Location) -> None:
    check_flipped(location, 1000)


def rows_of_all_sizes() -> list[Trajectory]:
    """Within a page of the file, and over many."""
    chance = random.Random(5)
    rows = []
    for number in range(40):
        count = chance.choice([6, 60, 3000])
        authors = [chance.choice(["user", "llm"]) for _ in range(count)]
        segment = Segment(tokens([chance.randrange(30_000) for _ in range(count)], authors))
        said = Message("user", "".join(chance.choices("abcdefgh ", k=chance.choice([20, 9000]))))
        rows.append(trajectory(f"t{number:02d}", slot=number, segments=(segment,), messages=(said,)))
    return rows
