"""`agentloop replay verify` without a model: exit codes, and what --yes does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replay.storage.databases import Location
from tests.fakes.records import FreshRows, new_store, sql
from tests.fakes.replay_command import ask

QUARANTINED = "select count(*) from trajectories where state = 'quarantined'"


def spoiled(location: Location, rows: int) -> Location:
    """100 rows, the first of them without their tokens."""
    store = new_store(location)
    FreshRows(1, rates=(0.5,) * 10, size=10).append_to(store)
    sql(store, "delete from segments where trajectory in (select id from trajectories where slot < ?)", rows)
    store.close()
    return location


@pytest.mark.parametrize(("rows", "words", "code"), [(0, [], 0), (1, [], 0), (2, [], 1), (2, ["--limit", "0.02"], 0)])
def test_verify_fails_over_the_limit(tmp_path: Path, rows: int, words: list[str], code: int) -> None:
    result = ask("verify", spoiled(tmp_path / "replay.sqlite", rows), *words)
    assert result.exit_code == code
    assert f"read          100, of which {rows} corrupt" in result.output


def test_verify_quarantines_with_yes_only(location: Location) -> None:
    spoiled(location, 2)
    assert "nothing was changed; add --yes to quarantine them" in ask("verify", location).output
    assert sql(location, QUARANTINED) == [(0,)]
    answer = json.loads(ask("verify", location, "--yes", "--json").output)
    assert (len(answer["corrupt"]), answer["corrupt_share"], answer["failed"]) == (2, 0.02, True)
    assert set(answer["corrupt"].values()) == {"other segments than were written"}
    assert sql(location, QUARANTINED) == [(2,)]
    # What was quarantined is known, and no longer counted against the limit.
    assert ask("verify", location).exit_code == 0
