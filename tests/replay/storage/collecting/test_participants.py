"""Who takes part in a run: workers and engines that report themselves, and one learner at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest

from replay import ReplayStore
from replay.errors import DatabaseFailed
from tests.fakes.records import RUN, new_store, sql
from tests.replay.storage.collecting.episodes import OVER, claim, close, episode, issue


def test_participants_are_known_until_they_leave_and_a_worker_sees_its_run_at_one_look(store: ReplayStore) -> None:
    view = store.roles.view(RUN)
    assert (view.has_ended, view.has_free_tickets, view.engines) == (False, False, ())
    issue(store, [0], size=1)
    for id, in_flight in (("w-1", 0), ("w-2", 0), ("w-1", 7)):
        store.roles.report("worker", RUN, id, {"in_flight": in_flight})
    store.roles.report("engine", RUN, "http://e:8000", {"state": "serving"})
    listed = store.roles.listed("worker", RUN)
    assert [(each.id, each.facts) for each in listed] == [("w-1", {"in_flight": 7}), ("w-2", {"in_flight": 0})]
    assert all(0 <= each.silent_s <= each.age_s < 600 for each in listed)
    store.roles.leave("worker", RUN, "w-1")
    assert [each.id for each in store.roles.listed("worker", RUN)] == ["w-2"]
    store.roles.end_run(RUN)
    view = store.roles.view(RUN)
    assert (view.has_ended, view.has_free_tickets, store.roles.count("worker", RUN, lease_s=60.0)) == (True, True, 1)
    assert [(engine.id, engine.facts) for engine in view.engines] == [("http://e:8000", {"state": "serving"})]
    (held,) = claim(store)
    assert not store.roles.view(RUN).has_free_tickets
    store.tickets.extend([held], lease_s=OVER)
    assert store.roles.view(RUN).has_free_tickets


_WORKERS_RIGHTS = """create role {role};
grant select on all tables in schema public to {role};
grant insert on trajectories, segments, messages, groups, reclaimed, observations to {role};
grant update on tickets, groups, buffer_state to {role};
grant insert, update, delete on workers, engines to {role}"""


def test_worker_needs_no_right_to_write_draws_or_iterations(new_database: Callable[..., str]) -> None:
    url = new_database()
    role = "worker_" + url.rsplit("/", 1)[-1].partition("?")[0].rsplit("_", 1)[-1]
    with closing(new_store(url)) as learner:
        issue(learner, [0])
        sql(url, _WORKERS_RIGHTS.format(role=role))
        with closing(ReplayStore.open(f"{url}&options=-crole%3D{role}")) as worker:
            held = claim(worker, "w", count=2)
            worker.roles.report("worker", RUN, "w", {})
            assert worker.tickets.extend(held, lease_s=60) == {}
            assert worker.tickets.finish([(held[0], episode(held[0]))]) == [True]
            assert worker.tickets.fail([held[1]], "overtime") == {}
            for write in (lambda: close(worker, 0), lambda: worker.resume(RUN, 0)):
                with pytest.raises(DatabaseFailed, match="permission denied"):
                    write()
        close(learner, 0)
        sql(url, f"drop owned by {role}; drop role {role}")
