"""Whole runs whose policy is sampled by an engine over HTTP, which gets every version with a proof."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from agentloop import train
from agentloop.config import RunConfig
from agentloop.engines.publish.proof import PROOFS, ProofFailed
from agentloop.engines.publish.published_policy import read_published
from agentloop.errors import UserError
from agentloop.runs.run_folder import COMPLETE
from replay.store import ReplayStore
from tests.fakes.engine_server import EngineServer, serving
from tests.fakes.runs import ROOT, SilentDisplay, StopAfter, buffer_of, rows, save_qwen2, small_config
from tests.vllm.server import free_port

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("model"))


def config(folder: Path, model: Path, server: EngineServer, **run: object) -> RunConfig:
    return small_config(
        folder,
        model,
        run={"name": "small", "folder": str(folder), "iterations": 3, "seed": 0, **run},
        rollout={"engine": "vllm", "temperature": 0.7},
        engine={"urls": [server.address], "restart_timeout_s": 0},
    )


def test_every_token_has_the_version_that_sampled_it_and_its_log_prob(tmp_path: Path, model: Path) -> None:
    display = SilentDisplay()
    with serving(model) as server:
        result = train(config(tmp_path, model, server), display=display)
    stored = rows(
        buffer_of(result.folder),
        "select iteration, policy_version_min, policy_version_max, count(*), count(mean_entropy) from trajectories "
        "group by 1, 2, 3 order by 1",
    )
    assert stored == [
        (iteration, iteration - 1, iteration - 1, 12 + 4 * (iteration == 1), 0) for iteration in (1, 2, 3)
    ]
    drifts = [metrics["actor/fresh/drift_max"] for metrics in display.iterations]
    assert max(drifts) <= 1.001
    assert {body["model"] for body in server.requests} == {"tiny"}


def test_a_run_goes_on_with_the_version_of_its_checkpoint(tmp_path: Path, model: Path) -> None:
    with serving(model) as server:
        train(config(tmp_path, model, server), display=StopAfter(2))
        assert server.models.label.partition("@")[2].startswith("2-")
    with serving(model, port=server.port) as server:  # started anew, with the weights the run began with
        resumed = train(config(tmp_path, model, server), display=SilentDisplay(), resume=True)
        assert server.models.label.partition("@")[2].startswith("3-")
    stored = rows(buffer_of(resumed.folder), "select distinct iteration, policy_version_min from trajectories")
    assert sorted(stored) == [(1, 0), (2, 1), (3, 2)]


class DiesBeforeAPublish(SilentDisplay):
    """The engine is gone when the first update begins, and back after a while."""

    def __init__(self, server: ExitStack, again: Callable[[], object]) -> None:
        super().__init__()
        self._server = server
        self._again = threading.Timer(1.0, again)

    def phase(self, name: str, done: int, total: int) -> None:
        if name == "update" and not self._again.ident:
            self._server.close()
            self._again.start()


def test_an_engine_that_died_is_waited_for_when_a_policy_is_published(tmp_path: Path, model: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(serving(model))
        given = config(tmp_path, model, server).model_dump()
        given["engine"]["restart_timeout_s"] = 60.0
        display = DiesBeforeAPublish(stack, lambda: stack.enter_context(serving(model, port=server.port)))
        result = train(RunConfig.model_validate(given), display=display)
    stored = rows(buffer_of(result.folder), "select distinct iteration, policy_version_min from trajectories")
    assert sorted(stored) == [(1, 0), (2, 1), (3, 2)]


class KeepsOldWeights(SilentDisplay):
    """The engine takes no weights any more from the second update on."""

    def __init__(self, server: EngineServer) -> None:
        super().__init__()
        self._server = server

    def phase(self, name: str, done: int, total: int) -> None:
        self._server.models.stays_old = name == "update" and len(self.iterations) == 1


def test_a_refused_publish_is_tried_once_more_and_then_ends_the_run_with_a_checkpoint(
    tmp_path: Path, model: Path
) -> None:
    with serving(model) as server:
        given = config(tmp_path, model, server)
        with pytest.raises(ProofFailed, match="it has kept weights of before"):
            train(given, display=KeepsOldWeights(server))
        (run,) = tmp_path.iterdir()
        assert (run / "checkpoints" / "000002" / COMPLETE).exists()
        lines = [json.loads(line) for line in (run / "policies" / PROOFS).read_text().splitlines()]
        assert [line["holds"] for line in lines] == [True, True, False, False]
        server.models.stays_old = False
        resumed = train(given, display=SilentDisplay(), resume=True)
    stored = rows(buffer_of(resumed.folder), "select distinct iteration, policy_version_min from trajectories")
    assert sorted(stored) == [(1, 0), (2, 1), (3, 2)]


def test_engines_in_bfloat16_are_asked_about_what_the_policy_said_last(tmp_path: Path, model: Path) -> None:
    with serving(model, number_type="bfloat16") as server:
        result = train(config(tmp_path, model, server), display=SilentDisplay())
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


def waiting_config(folder: Path, model: Path) -> RunConfig:
    """Its engine never answers, and would be waited for for ten minutes."""
    engine = {"urls": [f"http://127.0.0.1:{free_port()}"], "restart_timeout_s": 600}
    return small_config(folder, model, run={"folder": str(folder)}, rollout={"engine": "vllm"}, engine=engine)


class EndsTheStarter(SilentDisplay):
    """`agentloop engine` is started when the run begins to wait, and fails."""

    def __init__(self, *words: str) -> None:
        super().__init__()
        self._command = [sys.executable, "-m", "agentloop", "engine", *words]
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)
        if text.startswith("waiting for the engines"):
            subprocess.run(self._command, cwd=ROOT, check=False, capture_output=True)


def test_a_run_learns_at_once_that_who_was_to_start_its_engine_has_ended(tmp_path: Path, model: Path) -> None:
    given = waiting_config(tmp_path, model)
    port = given.engine.urls[0].rpartition(":")[2]
    display = EndsTheStarter("m", "--vllm", "/nowhere/vllm", "--port", port, "--run", str(tmp_path))
    with pytest.raises(UserError) as refused:
        train(given, display=display)
    assert str(refused.value).startswith(
        f"engine.urls must answer, got nothing from {given.engine.urls[0]}, whose `agentloop engine` has ended: "
        "--vllm must be vLLM's own executable, got '/nowhere/vllm'"
    )


def test_an_end_before_the_run_began_to_wait_is_named_and_waited_over(tmp_path: Path, model: Path) -> None:
    given = waiting_config(tmp_path, model)
    (url,) = given.engine.urls
    (tmp_path / f"engine-{url.rpartition(':')[2]}.ended").write_text("it was stopped")
    os.utime(tmp_path / f"engine-{url.rpartition(':')[2]}.ended", (0, 0))
    display = EndsTheStarter("m", "--vllm", "/nowhere/vllm", "--port", url.rpartition(":")[2], "--run", str(tmp_path))
    with pytest.raises(UserError, match="/nowhere/vllm"):
        train(given, display=display)
    (waiting,) = [note for note in display.notes if note.startswith("waiting for the engines")]
    assert waiting.endswith("The last `agentloop engine` there has ended: it was stopped")
