"""A run that workers collect for: staleness is bounded, the mix exact, and nothing that was collected is lost."""

from pathlib import Path

import pytest

from tests.fakes.run_roles import ENGINE_ROLE, LEARNER, Roles, roles_config, running_roles
from tests.fakes.runs import PARITY, ROOT, buffer_of, rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("staleness", "name"), [(0, PARITY), (2, f"{ROOT / 'examples' / 'number_game.py'}:NumberGame")]
)
def test_a_run_by_workers_ends_with_every_row_in_its_bound(
    tmp_path: Path, qwen2: Path, staleness: int, name: str
) -> None:
    config = roles_config(tmp_path, qwen2, {"max_staleness": staleness}, environment={"name": name})
    roles = Roles(tmp_path, config)
    with running_roles(roles, [ENGINE_ROLE, LEARNER, "worker-1", "worker-2"]):
        roles.until(lambda: not any(roles.is_running(role) for role in (LEARNER, "worker-1", "worker-2")))
    assert roles.processes[LEARNER].wait() == 0, roles.printed(LEARNER)
    found, database = roles.look(), buffer_of(roles.run)
    assert found is not None
    assert (found.late, found.unused, found.open, found.failed) == (0, 0, 0, 0)
    assert rows(database, "select count(*) from draws group by iteration") == [(16,)] * 6
    assert rows(database, "select fresh + replay from iterations") == [(16,)] * 6
    assert rows(database, "select max(staleness) from draws where stream = 'fresh'")[0][0] <= staleness
    answered_back = rows(database, "select count(*) from trajectories where num_user_turns > 0")[0][0]
    assert (answered_back > 0) == (name != PARITY)
    # Batch n is issued as many updates ahead as its rows may be stale; how stale they are depends on the workers.
    issued = "select iteration, json_extract(plan, '$.version') from planned_batches order by iteration"
    assert rows(database, issued) == [(n, max(0, n - 1 - staleness)) for n in range(1, 7)]
