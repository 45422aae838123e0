"""Tasks that end their worker or never end: the run ends, and everything counts once."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentloop.config import RunConfig
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.run_roles import ENGINE_ROLE, LEARNER, Roles, check_rows, roles_config, running_roles
from tests.fakes.runs import buffer_of, rows, save_qwen2

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
WORKERS = ("worker-1", "worker-2")
STRAGGLERS = ENVIRONMENTS / "slow_tools.py"
LEASE_S = 2.0
ENDLESS_TOOL, ENDLESS_START, POISON = 1, 2, 5


def deadly(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    return roles_config(
        folder,
        save_qwen2(folder / "model"),
        {"max_staleness": 1, "lease_s": LEASE_S},
        environment={"name": f"{STRAGGLERS}:Deadly"},
        context={"parser": f"{STRAGGLERS}:Calling", "max_tokens": 800},
        evaluation={"every": 0, "tasks": 4},
        rollout={
            "engine": "vllm",
            "temperature": 0.7,
            "max_turns": 3,
            "max_tokens_per_turn": 12,
            "tool_timeout_s": 1,
            "episode_timeout_s": 15,
        },
        **sections,
    )


@pytest.mark.parametrize("killed", [False, True], ids=["", "learner killed"])
def test_tasks_that_kill_or_never_end_cost_their_episodes_alone(tmp_path: Path, killed: bool) -> None:
    """Whoever dies is started again, as a launcher does: workers by the tasks, the learner as it is killed."""
    roles, began = Roles(tmp_path, deadly(tmp_path)), time.monotonic()
    left = [LEARNER] if killed else []

    def ended() -> bool:
        found = roles.look()
        if left and found is not None and found.failed > 0:
            roles.kill(left.pop())
        for name in (ENGINE_ROLE, *WORKERS):
            if not roles.is_running(name) and not roles.has_learned:
                roles.start(name)
        return roles.has_learned

    with running_roles(roles, [ENGINE_ROLE, LEARNER, *WORKERS]):
        roles.until(ended, limit_s=1500)
    found = roles.look()
    assert found is not None
    database = buffer_of(roles.run)
    query = """select s.payload, t.state, t.reason, t.tries from tickets t join tasks s on s.hash = t.task
               where t.purpose = 'train'"""
    ends = [(json.loads(payload)["kind"], *end) for payload, *end in rows(database, query)]
    starts = sum(roles.started[name] for name in WORKERS)
    print(f"{starts} starts of two workers, {time.monotonic() - began:.0f} s: {found}")
    print(Counter((kind, *end) for kind, *end in ends))
    poison = {tuple(end) for kind, *end in ends if kind == POISON}
    assert poison == {("failed", "3 workers claimed it, and none of them answered", 3)}
    never = [(state, reason) for kind, state, reason, _ in ends if kind == ENDLESS_START]
    assert never and {state for state, _ in never} == {"failed"}
    assert all("rollout.episode_timeout_s" in reason for _, reason in never)
    others = {state for kind, state, *_ in ends if kind not in (POISON, ENDLESS_START)}
    assert others == {"done"} and any(kind == ENDLESS_TOOL for kind, *_ in ends)
    endless = """select distinct error_kind from trajectories t join tasks s on s.hash = t.task
                 where num_tool_calls > 0 and s.payload like '%"kind":1,%'"""
    assert rows(database, endless) == [("timeout",)]
    assert (found.done, found.late, found.waiting, found.open) == (found.fresh, 0, 0, 0)
    check_rows(roles, staleness=1)
