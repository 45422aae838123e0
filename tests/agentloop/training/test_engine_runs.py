"""Whole runs whose policy is sampled by an engine over HTTP, given or of the run's own: each version has a proof."""

import json
import os
import re
import signal
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from agentloop import train
from agentloop.config import RunConfig
from agentloop.engines.publish.proof import PROOFS, ProofFailed
from agentloop.engines.publish.published_policy import read_published
from agentloop.engines.serving.served_engine import EngineEnded, serve_options
from agentloop.runs.run_folder import COMPLETE, has_run
from replay.store import ReplayStore
from tests.fakes.engine_server import EngineServer, serving
from tests.fakes.processes import processes
from tests.fakes.published_policies import by_value
from tests.fakes.refusals import refusal_of
from tests.fakes.run_roles import engine_executable
from tests.fakes.runs import SilentDisplay, buffer_of, rows, small_config

pytestmark = pytest.mark.slow


def config(folder: Path, model: Path, server: EngineServer, *, restart_timeout_s: float = 0.0) -> RunConfig:
    engine = {"urls": [server.address], "restart_timeout_s": restart_timeout_s}
    return small_config(folder, model, rollout={"engine": "vllm", "temperature": 0.7}, engine=engine)


def versions(run: Path) -> list[tuple[int, int]]:
    """Which version of the policy sampled the episodes of each iteration."""
    return rows(buffer_of(run), "select distinct iteration, policy_version_min from trajectories order by iteration")


def test_every_token_has_the_version_that_sampled_it_and_its_log_prob(tmp_path: Path, qwen2: Path) -> None:
    display = SilentDisplay()
    with serving(qwen2) as server:
        result = train(config(tmp_path, qwen2, server), display=display)
    stored = rows(
        buffer_of(result.folder),
        "select iteration, policy_version_min, policy_version_max, count(*), count(mean_entropy) from trajectories "
        "group by 1, 2, 3 order by 1",
    )
    assert stored == [(made, made - 1, made - 1, 12 + 4 * (made == 1), 0) for made in (1, 2, 3)]
    gaps = [metrics["actor/fresh/token_gap_max"] for metrics in display.iterations]
    assert max(gaps) <= 0.0009995  # log 1.001
    assert {body["model"] for body in server.requests} == {"tiny"}


def test_an_engine_that_died_is_waited_for_when_a_policy_is_published(tmp_path: Path, qwen2: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(serving(qwen2))
        given = config(tmp_path, qwen2, server, restart_timeout_s=60.0)
        again = threading.Timer(1.0, lambda: stack.enter_context(serving(qwen2, port=server.port)))

        def dies(phase: str, iterations: int) -> None:
            """The engine is gone when the first update begins, and back after a while."""
            if phase == "update" and not again.ident:
                stack.close()
                again.start()

        result = train(given, display=SilentDisplay(at_phase=dies))
    assert versions(result.folder) == [(1, 0), (2, 1), (3, 2)]


def test_a_refused_publish_is_tried_twice_and_ends_the_run_with_a_checkpoint(tmp_path: Path, qwen2: Path) -> None:
    with serving(qwen2) as server:
        given = config(tmp_path, qwen2, server)

        def keeps_old_weights(phase: str, iterations: int) -> None:
            server.models.stays_old = phase == "update" and iterations == 1

        with pytest.raises(ProofFailed, match="it has kept previous weights"):
            train(given, display=SilentDisplay(at_phase=keeps_old_weights))
        (run,) = tmp_path.glob("small-*")
        assert (run / "checkpoints" / "000002" / COMPLETE).exists()
        lines = [json.loads(line) for line in (run / "policies" / PROOFS).read_text().splitlines()]
        assert [line["holds"] for line in lines] == [True, True, False, False]
        server.models.stays_old = False
        resumed = train(given, display=SilentDisplay(), resume=True)
    assert versions(resumed.folder) == [(1, 0), (2, 1), (3, 2)]


def test_engines_in_bfloat16_are_asked_about_what_the_policy_said_last(tmp_path: Path, qwen2: Path) -> None:
    with serving(qwen2, number_type="bfloat16") as server:
        result = train(config(tmp_path, qwen2, server), display=SilentDisplay())
    probe = read_published(result.folder / "policies" / "000003").probe
    assert probe.number_type == "bfloat16"
    # The policy says which bytes engines were given; the folders of the two newest are there.
    published = [read_published(result.folder / "policies" / f"{version:06d}") for version in (2, 3)]
    recorded = rows(buffer_of(result.folder), "select sha256, probe from policies where version >= 2 order by version")
    assert recorded == [(policy.sha256, policy.probe.model_dump_json()) for policy in published]
    assert probe.before is not None and probe.before != probe.log_probs
    with closing(ReplayStore.open(buffer_of(result.folder), read_only=True)) as store:
        ids = [id for (id,) in rows(buffer_of(result.folder), "select id from trajectories where iteration = 3")]
        stored = [trajectory.segments[-1].tokens for trajectory in store.read(ids)]
    ends = {tuple(tokens.token_ids[: int((tokens.policy_versions >= 0).nonzero()[0][-1]) + 1]) for tokens in stored}
    assert len(probe.rows) == 12
    assert all(any(end[-len(row) :] == row for end in ends) for row in probe.rows)
    lines = [json.loads(line) for line in (result.folder / "policies" / PROOFS).read_text().splitlines()]
    assert [line["holds"] for line in lines] == [True] * 4


@pytest.fixture(autouse=True)
def executable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    program = engine_executable(tmp_path / "bin")
    monkeypatch.setenv("AGENTLOOP_VLLM", str(program))
    return program


def serving_config(folder: Path, model: Path, **sections: dict[str, Any]) -> RunConfig:
    given: dict[str, Any] = {"rollout": {"engine": "vllm"}, "engine": {"serve": True}, "checkpoint": {"every": 10}}
    return small_config(folder / "runs", model, run={"iterations": 2}, **given | sections)


def engine_logs(folder: Path) -> list[Path]:
    return sorted(folder.glob("runs/*/engine-*.log"), key=lambda path: path.stat().st_mtime)


def started(folder: Path) -> list[int]:
    """All that were started for the engines of the runs in `folder`, by their words."""
    ports = [log.stem.rpartition("-")[2] for log in engine_logs(folder)]
    return processes(lambda found: any(f"--port\0{port}\0" in (found / "cmdline").read_text() for port in ports))


def calls(log: Path) -> list[str]:
    """What its control was asked, in this order."""
    paths = re.findall(r'"POST /(\S+) HTTP', log.read_text())
    return [path for path in paths if not path.startswith(("inference/", "tokenize", "v1/completions"))]


def test_a_run_starts_its_engine_and_ends_it(tmp_path: Path, qwen2: Path) -> None:
    display = SilentDisplay()
    result = train(serving_config(tmp_path, qwen2), display=display)
    (log,) = engine_logs(tmp_path)
    assert log.parent == result.folder
    assert f"starting vllm serve {qwen2} (log: {log})" in display.notes
    assert started(tmp_path) == []
    stored = rows(buffer_of(result.folder), "select distinct iteration, policy_version_min from trajectories")
    assert sorted(stored) == [(1, 0), (2, 1)]
    one_publish = ["pause?mode=keep", "collective_rpc", "reset_prefix_cache?reset_running_requests=true"]
    assert calls(log) == [*one_publish, "update_weight_version", "resume"] * 3
    for metrics in display.iterations:
        parts = [metrics[f"time/publish_{part}"] for part in ("probe", "write", "load", "prove")]
        assert 0 < sum(parts) <= metrics["time/publish"]
        assert "time/sleep" not in metrics and "time/wake" not in metrics


def test_an_engine_on_the_learners_gpu_sleeps_from_the_last_episode_to_the_next_weights(
    tmp_path: Path, qwen2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, but that handles of memory hold the numbers. What the test server discards is other numbers then."""
    monkeypatch.setattr(
        "agentloop.training.components.serve_options",
        lambda config, model, **_: serve_options(config, model, shares_gpu=True),
    )
    monkeypatch.setattr("agentloop.training.policies.engine_publisher.shared_weights", by_value)
    display = SilentDisplay()
    result = train(serving_config(tmp_path, qwen2, checkpoint={"keep_policies": "none"}), display=display)
    (log,) = engine_logs(tmp_path)
    receive = ["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
    load = ["pause?mode=keep", *receive]
    named = ["reset_prefix_cache?reset_running_requests=true", "update_weight_version", "resume"]
    sleep = ["sleep?level=2&mode=abort", "update_weight_version"]
    again = [*sleep, "wake_up?tags=weights", *load, "wake_up?tags=kv_cache", *named]
    assert calls(log) == [*load, *named, *again, *again]
    for metrics in display.iterations:
        assert "time/publish_write" not in metrics and metrics["time/sleep"] > 0
        assert 0 < metrics["time/wake"] <= metrics["time/publish_load"]
    assert [path.name for path in (result.folder / "policies").iterdir() if path.is_dir()] == []
    proofs = (result.folder / "policies" / PROOFS).read_text().splitlines()
    assert [json.loads(line)["holds"] for line in proofs] == [True] * 3


def test_a_failed_start_is_one_line_with_its_log_and_no_run(tmp_path: Path, qwen2: Path, executable: Path) -> None:
    executable.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 0.32.0 && exit\necho "OSError: no such GPU"; exit 3\n'
    )
    said = refusal_of(train, serving_config(tmp_path, qwen2), display=SilentDisplay())
    (log,) = engine_logs(tmp_path)
    assert said == (f"vllm serve must start, got exit code 3: OSError: no such GPU See its log: {log}")
    assert not has_run(log.parent)
    assert [path.name for path in log.parent.iterdir()] == [log.name]


@pytest.mark.parametrize(("phase", "learned"), [("collect", 1), ("update", 2)])
def test_a_run_whose_engine_dies_goes_on_with_another(tmp_path: Path, qwen2: Path, phase: str, learned: int) -> None:
    given = serving_config(tmp_path, qwen2)

    def kill(now: str, iterations: int) -> None:
        for pid in started(tmp_path) if (now, iterations) == (phase, 1) else ():
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(EngineEnded, match=r"must stay up, got exit code -9: .* Its log is .*/engine-\d+.log"):
        train(given, display=SilentDisplay(at_phase=kill))
    (run,) = tmp_path.glob("runs/*")
    assert (run / "checkpoints" / f"{learned:06d}" / COMPLETE).exists()
    resumed = train(given, display=SilentDisplay(), resume=True)
    stored = rows(buffer_of(resumed.folder), "select distinct iteration, policy_version_min from trajectories")
    assert sorted(stored) == [(1, 0), (2, 1)]
    assert len(engine_logs(tmp_path)) == 2 and started(tmp_path) == []
