"""A run some of whose groups begin inside its own successes, from its folder alone."""

from pathlib import Path
from typing import Any

import pytest

from agentloop.config import RunConfig
from agentloop.rollouts.stored.restarts import RestartFinder
from agentloop.training.train import train
from replay.pages.addresses import address
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.processes import assert_same_run
from tests.fakes.replay_command import ask
from tests.fakes.runs import SilentDisplay, StopAfter, rows, small_config
from tests.replay.pages.serving import inspecting

pytestmark = pytest.mark.slow

PARITY = ENVIRONMENTS / "parity.py"


def restarting(folder: Path, model: Path) -> RunConfig:
    acting: dict[str, Any] = {"environment": {"name": f"{PARITY}:Repeatable"}, "rollout": {"max_turns": 5}}
    learning: dict[str, Any] = {"run": {"iterations": 4}, "batch": {"trajectories": 20}, "evaluation": {"every": 0}}
    context = {"parser": f"{PARITY}:Hesitant", "max_tokens": 600}
    replay = {"restarts": {"enable": True, "fraction": 0.3}}
    return small_config(folder, model, context=context, replay=replay, **acting, **learning)


Finished = tuple[Path, list[dict[str, float]]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> Finished:
    """The run's folder, and its metrics by iteration."""
    display = SilentDisplay()
    result = train(restarting(tmp_path_factory.mktemp("run"), qwen2), display=display)
    return result.folder, display.iterations


def test_the_share_is_exact_over_iterations_and_what_is_missing_is_counted(finished: Finished) -> None:
    folder, metrics = finished
    query = (
        "select count(distinct case source when 'restart' then group_id end), count(distinct group_id), "
        "avg(case source when 'self' then success end) from trajectories group by iteration"
    )
    found = rows(folder / "replay.sqlite", query)
    # 0.3 of 5, 4, 4 and 4 groups are 1.5, 1.2, 1.2 and 1.2: 1, 2, 1 and 1, of which the buffer has 0, 1, 1 and 1.
    assert [(restarted, groups) for restarted, groups, _ in found] == [(0, 5), (1, 4), (1, 4), (1, 4)]
    assert [each.get("restarts/groups", 0) for each in metrics] == [0, 1, 1, 1]
    assert [each["restarts/missing_groups"] for each in metrics] == [1, 1, 0, 0]
    assert [each["batch/fresh_shortfall"] for each in metrics] == [0, 0, 0, 0]
    assert [each["rollout/success"] for each in metrics] == pytest.approx([success for _, _, success in found])


def test_log_probs_of_kept_replies_are_computed_again(finished: Finished) -> None:
    joined = "from draws d join trajectories t on t.id = d.trajectory where d.stream = 'fresh' and t.kept_turns > 0"
    ((count, least),) = rows(finished[0] / "replay.sqlite", f"select count(*), min(d.token_gap_max) {joined}")
    # Three groups of three, behind replies of weights that have moved since.
    assert count == 9 and least > 1e-4


def test_lineage_names_the_success_and_what_was_kept(finished: Finished) -> None:
    folder, query = finished[0], "select id, parent, kept_turns from trajectories where source = 'restart' limit 1"
    ((id, parent, kept),) = rows(folder / "replay.sqlite", query)
    for command in ("lineage", "show"):
        shown = " ".join(ask(command, id, folder).output.split())
        assert f"source restart, from {parent}, {kept} of its replies kept" in shown
    assert f"made from it: {id}" in ask("lineage", parent, folder).output
    with inspecting(folder / "replay.sqlite") as inspector:
        assert f"{kept} of its replies kept" in inspector.words(address("trajectories", id))


def test_resumed_run_restarts_as_the_unbroken_one(finished: Finished, tmp_path: Path, qwen2: Path) -> None:
    assert train(restarting(tmp_path, qwen2), display=StopAfter(2)).iterations == 2
    second = train(restarting(tmp_path, qwen2), resume=True, display=SilentDisplay())
    assert_same_run(second.folder, finished[0])


def test_success_behind_which_nothing_is_the_same_again_is_tried_once(
    tmp_path: Path, qwen2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, behind = [], RestartFinder.behind
    monkeypatch.setattr(RestartFinder, "behind", lambda *args: tried.append(args[1]) or behind(*args))
    config, display = restarting(tmp_path, qwen2), SilentDisplay()
    other = config.context.model_copy(update={"parser": f"{PARITY}:Moonstruck"})
    train(config.model_copy(update={"context": other}), display=display)
    assert sum(each["rollout/engine_failures"] for each in display.iterations) > 0
    assert len(tried) == len(set(tried)) > 1


def test_shares_of_environments_are_of_episodes_from_the_start(tmp_path: Path, qwen2: Path) -> None:
    part = {"share": 0.5, "name": f"{PARITY}:Repeatable"}
    plain = restarting(tmp_path, qwen2).model_dump(mode="json") | {"environment": {}}
    plain["replay"]["restarts"]["fraction"], plain["run"]["iterations"] = 0.8, 10
    config = RunConfig.model_validate(plain | {"environments": {"first": part, "second": part}})
    run = train(config, display=SilentDisplay())
    query = "select source, sum(environment = 'first') - sum(environment = 'second') from trajectories group by source"
    ahead = dict(rows(run.folder / "replay.sqlite", query))
    assert abs(ahead["self"]) <= config.batch.group_size < abs(ahead["restart"]), ahead
