import json
from typing import Any

from replay import ReplayStore, questions
from tests.fakes.records import RUN, a_run, sql
from tests.replay.storage.collecting.episodes import issue


def cluster(store: ReplayStore, run: str = RUN) -> dict[str, Any]:
    answer = questions.cluster(store, store.run(run))
    json.dumps(answer, allow_nan=False)
    return answer


def test_other_runs_play_no_part_and_a_worker_is_gone_after_a_lease_of_silence(store: ReplayStore) -> None:
    before = cluster(store)
    store.roles.report("worker", RUN, "worker-2", {"failed": 1, "tool_errors": 3})
    store.roles.report("engine", RUN, "engine", {"state": "serving"})
    issue(store, [0])
    answer = cluster(store)
    (worker,) = answer["workers"]
    assert (worker["failed"], worker["tool_errors"], worker["gone"], answer["ended"]) == (1, 3, False, False)
    assert questions.is_collected_by_workers(store, store.run(RUN))
    store.add_run(a_run("run-2"))
    assert {**cluster(store, "run-2"), "run": RUN} == before
    sql(store, "update workers set seen_at = seen_at - 80")  # more than a lease
    assert cluster(store)["workers"][0]["gone"]
