from contextlib import closing
from pathlib import Path

from replay import ReplayStore, questions
from replay.exchange.attach import attach
from replay.exchange.teacher import teaching_of
from replay.questions import Query, Sort
from replay.sampling.samplers import make_sampler
from replay.storage.retention import Capacity
from tests.fakes.records import RUN, a_run, iterate, new_store, policy, request

OTHER = "run-2"


def test_staleness_of_attached_rows_is_unknown_wherever_it_is_asked(tmp_path: Path) -> None:
    with closing(new_store(tmp_path / "earlier.sqlite")) as earlier:
        for iteration in (1, 2, 3):  # their own run went on to policy 3
            iterate(earlier, iteration)
            earlier.add_policy(policy(iteration))
    with closing(ReplayStore.create(tmp_path / "replay.sqlite")) as store:
        store.add_run(a_run(OTHER))
        store.add_policy(policy(0, run=OTHER))
        attach(store, OTHER, "earlier", str(tmp_path / "earlier.sqlite"), teach=teaching_of)
        listed = questions.page(store, Query(RUN, sort=Sort.staleness), limit=100)["rows"]
        assert {row["staleness"] for row in listed} == {None} and len(listed) == 24
        overview = questions.overview(store, listed[0]["id"])
        assert (overview["staleness"], overview["record"]["run"]) == (None, RUN)
        assert questions.summary(store)["staleness"] == {"mean": None, "max": None, "known": 0}
        found = questions.distributions(store, Query(None, ("staleness is None",)))
        assert (found["total"], found["fields"]["staleness"]["unknown"]) == (24, 24)
        drawn = store.draw(request(9, 4, run=OTHER), make_sampler("uniform", 0))
        assert [row.draw.staleness for row in drawn if row.draw] == [None] * 4
        assert store.prune(capacity=Capacity(staleness=1), dry_run=True).rows == 0
