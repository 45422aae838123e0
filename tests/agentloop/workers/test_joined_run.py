"""What a worker must have of its run, and what it is refused for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agentloop.errors import UserError
from agentloop.runs.run_folder import create_run_folder
from agentloop.workers.joined_run import join_run
from replay.ticket_records import TicketRecord
from tests.fakes.engine_server import EngineServer, serving
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.runs import save_qwen2, small_config
from tests.fakes.worker_runs import IssuedRun, issued_run, worker_config


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    with serving(save_qwen2(tmp_path_factory.mktemp("model"))) as server:
        yield server


@pytest.fixture
def run(tmp_path: Path, server: EngineServer) -> Iterator[IssuedRun]:
    environment = tmp_path / "mine.py"
    environment.write_text((ENVIRONMENTS / "parity.py").read_text())
    config = worker_config(
        tmp_path / "runs",
        server.models.folder,
        server,
        tmp_path / "replay.sqlite",
        environment={"name": f"{environment}:Parity"},
    )
    with issued_run(config) as run:
        yield run


def refusal(path: Path) -> str:
    notes: list[str] = []
    with pytest.raises(UserError) as caught:
        join_run(path, wait_s=0.0, note=notes.append)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_worker_has_the_tokens_and_the_end_tokens_of_the_learner(run: IssuedRun) -> None:
    notes: list[str] = []
    joined = join_run(run.folder, wait_s=0.0, note=notes.append)
    with closing(joined.store):
        mine, learner = joined.actors, run.components.actors
        assert mine.renderer.codec.hash == learner.renderer.codec.hash
        assert (mine.renderer.stop_ids, mine.vocab_size) == (learner.renderer.stop_ids, learner.vocab_size)
        assert len(mine.renderer.stop_ids) == 51  # one of the tokenizer, fifty that only the generation config names
        assert notes == []


def test_another_code_version_is_only_noted(run: IssuedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.workers.joined_run.version", lambda name: "9.9")
    notes: list[str] = []
    join_run(run.folder, wait_s=0.0, note=notes.append).store.close()
    assert notes == ["the run was begun with version 0.1.0, this worker is 9.9"]


def test_a_run_that_is_not_there_is_waited_for_and_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "run-001").startswith("RUN must be there within --wait 0 s, got ")


def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path, server: EngineServer) -> None:
    config = worker_config(tmp_path, server.models.folder, server, tmp_path / "replay.sqlite")
    folder = create_run_folder(config)
    assert "(the learner has not begun it)" in refusal(folder.path)


def test_a_run_that_collects_by_itself_is_refused(tmp_path: Path) -> None:
    folder = create_run_folder(small_config(tmp_path, tmp_path / "model"))
    assert refusal(folder.path).startswith("collection.by must be workers for agentloop worker, got loop in ")


def test_another_environment_is_refused(run: IssuedRun, tmp_path: Path) -> None:
    with (tmp_path / "mine.py").open("a") as file:
        file.write("\n# changed\n")
    assert re.match(
        r"environment.name must have the source that the run has, got .*mine.py:Parity", refusal(run.folder)
    )


def test_another_template_is_refused(run: IssuedRun) -> None:
    template = run.folder / "start" / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert refusal(run.folder).startswith("template of a worker must be the run's, got ")


def test_another_tokenizer_is_refused(run: IssuedRun) -> None:
    path = run.folder / "start" / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": {"type": "NFKC"}}))
    assert refusal(run.folder).startswith("tokenizer of a worker must be the run's, got ")


def test_a_task_that_the_learner_has_not_is_refused(run: IssuedRun) -> None:
    run.issue(1)
    joined = join_run(run.folder, wait_s=0.0, note=str)
    with closing(joined.store):
        ticket = TicketRecord(run.id, 0, 0, "0" * 64, 1)
        with pytest.raises(UserError, match="tasks of a worker must be the learner's, got none with the hash 0000"):
            joined.tasks.find(ticket, joined.tasks.planned([ticket]))


def test_an_engine_that_does_not_say_which_weights_sampled_is_refused(run: IssuedRun, server: EngineServer) -> None:
    server.scale_out = False
    try:
        assert refusal(run.folder).startswith("engine.urls must be engines that say which weights sampled each token")
    finally:
        server.scale_out = True
