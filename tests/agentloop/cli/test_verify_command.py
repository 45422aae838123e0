"""`agentloop replay verify` without a model: exit codes, and what --yes does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agentloop.cli.main import app
from replay.storage.databases import Location
from tests.fakes.records import FreshRows, new_store, sql

QUARANTINED = "select count(*) from trajectories where state = 'quarantined'"


def ask(*words: str) -> Result:
    result = CliRunner().invoke(app, ["replay", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def spoiled(location: Location, rows: int) -> Location:
    """100 rows, the first of them without their tokens."""
    store = new_store(location)
    FreshRows(1, rates=(0.5,) * 10, size=10).append_to(store)
    sql(store, "delete from segments where trajectory in (select id from trajectories where slot < ?)", rows)
    store.close()
    return location


@pytest.mark.parametrize(("rows", "words", "code"), [(0, [], 0), (1, [], 0), (2, [], 1), (2, ["--limit", "0.02"], 0)])
def test_verify_fails_over_the_limit(tmp_path: Path, rows: int, words: list[str], code: int) -> None:
    result = ask("verify", str(spoiled(tmp_path / "replay.sqlite", rows)), *words)
    assert result.exit_code == code
    assert f"read          100, of which {rows} corrupt" in result.output


def test_verify_quarantines_with_yes_only(location: Location) -> None:
    spoiled(location, 2)
    result = ask("verify", str(location))
    assert "nothing was changed; add --yes to quarantine them" in result.output
    assert sql(location, QUARANTINED) == [(0,)]
    answer = json.loads(ask("verify", str(location), "--yes", "--json").output)
    assert (len(answer["corrupt"]), answer["corrupt_share"], answer["failed"]) == (2, 0.02, True)
    assert set(answer["corrupt"].values()) == {"other segments than were written"}
    assert sql(location, QUARANTINED) == [(2,)]
    # What was quarantined is known, and no longer counted against the limit.
    assert ask("verify", str(location)).exit_code == 0


def test_model_needs_a_run_folder(tmp_path: Path) -> None:
    spoiled(tmp_path / "replay.sqlite", 0)
    result = CliRunner().invoke(app, ["replay", "verify", str(tmp_path), "--log-probs"])
    assert "RUN must be a run folder with a run.json" in str(result.exception)


def test_commands_that_ask_no_model_need_no_torch(tmp_path: Path) -> None:
    spoiled(tmp_path / "replay.sqlite", 0)
    program = (
        "import sys; from agentloop.cli.main import app\n"
        "try: app(['replay', 'verify', sys.argv[1]])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers', 'alembic') if name in sys.modules])"
    )
    output = subprocess.check_output([sys.executable, "-c", program, str(tmp_path)], text=True)
    assert output.strip().endswith("[]")
