"""Workers, the learner, the engine and the database of a run are killed, and nothing that was collected is lost."""

from __future__ import annotations

import time

from tests.fakes.postgres_servers import LocalServer
from tests.fakes.run_roles import ENGINE_ROLE, LEARNER, Roles, running_roles
from tests.fakes.runs import buffer_of, rows


def kill_all(roles: Roles, *, workers: int, rounds: int, staleness: int, server: LocalServer | None = None) -> None:
    """Each in turn, once more was collected since, in so many rounds with an iteration between; then up to the end."""
    names = [f"worker-{number + 1}" for number in range(workers)]
    kinds = ("worker", LEARNER, ENGINE_ROLE, *(["database"] if server else []))
    kills, began = dict.fromkeys(kinds, 0), time.monotonic()
    with running_roles(roles, [ENGINE_ROLE, LEARNER, *names]):
        for number in range(rounds):
            roles.until_learned(1, limit_s=900)
            for kind in kinds if not roles.has_learned else ():
                kill(roles, names[number % workers] if kind == "worker" else kind, server)
                kills[kind] += 1
                roles.until_done(1, limit_s=600)
        roles.until(lambda: roles.has_learned, limit_s=2400)
        roles.until(lambda: not any(roles.is_running(name) for name in names))
    found = roles.look()
    assert found is not None
    print(f"{kills}, {roles.started[LEARNER]} starts of the learner, {time.monotonic() - began:.0f} s: {found}")
    assert set(kills.values()) == {rounds}
    assert found.queued == found.leased == 0
    check_rows(roles, staleness=staleness)


def kill(roles: Roles, role: str, server: LocalServer | None) -> None:
    if role == "database":
        assert server is not None
        server.crash()
        server.start()
    elif role == ENGINE_ROLE:
        roles.kill_server()
    else:
        roles.kill(role)
        roles.start(role)


def check_rows(roles: Roles, *, staleness: int) -> None:
    """Each member is there once, and is fresh once, within the bound."""
    database = buffer_of(roles.run)
    assert rows(database, "select 1 from trajectories group by group_id, member having count(*) > 1") == []
    twice = "select trajectory from draws where stream = 'fresh' and state = 'committed' group by 1 having count(*) > 1"
    assert rows(database, twice) == []
    assert rows(database, "select max(staleness) from draws where stream = 'fresh'")[0][0] <= staleness
