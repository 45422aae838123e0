"""Workers, the learner, the engine and the database of a run are killed again and again: nothing collected is lost."""

import time
from pathlib import Path

import pytest

from tests.fakes.postgres_servers import LocalServer
from tests.fakes.run_roles import ENGINE_ROLE, LEARNER, Roles, roles_config, running_roles
from tests.fakes.runs import buffer_of, rows, save_qwen2

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
ROUNDS = 10
STALENESS = 2


def test_a_run_outlives_ten_kills_of_each_role(tmp_path: Path) -> None:
    outlive_kills(tmp_path, None)


def test_a_run_outlives_ten_kills_of_each_role_and_of_its_server(tmp_path: Path, own_server: LocalServer) -> None:
    outlive_kills(tmp_path, own_server)


def outlive_kills(tmp_path: Path, server: LocalServer | None) -> None:
    """Each in turn, once more was collected since, with an iteration between the rounds; then up to the end."""
    config = roles_config(
        tmp_path,
        save_qwen2(tmp_path / "model"),
        {"max_staleness": STALENESS, "lease_s": 3},
        run={"name": "small", "folder": str(tmp_path), "iterations": 60, "seed": 0},
        evaluation={"every": 0, "tasks": 8},
        replay={"database": server and server.url(server.new_database(empty=True))},
    )
    roles = Roles(tmp_path, config, engine_words=["--silence", "10"])
    names = [f"worker-{number + 1}" for number in range(4 if server else 2)]
    kinds = ("worker", LEARNER, ENGINE_ROLE, *(["database"] if server else []))
    kills, began = dict.fromkeys(kinds, 0), time.monotonic()
    with running_roles(roles, [ENGINE_ROLE, LEARNER, *names]):
        for number in range(ROUNDS):
            roles.until_more(lambda found: found.fresh, 1, limit_s=900)
            for kind in kinds if not roles.has_learned else ():
                kill(roles, names[number % len(names)] if kind == "worker" else kind, server)
                kills[kind] += 1
                roles.until_more(lambda found: found.done, 1, limit_s=600)
        roles.until(lambda: roles.has_learned, limit_s=2400)
        roles.until(lambda: not any(roles.is_running(name) for name in names))
    found = roles.look()
    assert found is not None
    print(f"{kills}, {roles.started[LEARNER]} starts of the learner, {time.monotonic() - began:.0f} s: {found}")
    assert set(kills.values()) == {ROUNDS}
    assert found.queued == found.leased == 0
    # Each member is there once, and is fresh once, within the bound.
    database = buffer_of(roles.run)
    assert rows(database, "select 1 from trajectories group by group_id, member having count(*) > 1") == []
    twice = "select trajectory from draws where stream = 'fresh' and state = 'committed' group by 1 having count(*) > 1"
    assert rows(database, twice) == []
    assert rows(database, "select max(staleness) from draws where stream = 'fresh'")[0][0] <= STALENESS


def kill(roles: Roles, role: str, server: LocalServer | None) -> None:
    """And start it again."""
    if role == "database":
        assert server is not None
        server.crash()
        server.start()
        return
    if role == ENGINE_ROLE:
        roles.kill_server()
    else:
        roles.kill(role)
    roles.start(role)
