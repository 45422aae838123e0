"""What a worker must have of its run, and what it is refused for."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agentloop.errors import UserError
from agentloop.runs.run_folder import create_run_folder
from agentloop.workers.joined_run import join_run
from replay.errors import ReplayError
from replay.storage.collecting.ticket_records import TicketRecord
from tests.fakes.engine_server import EngineServer
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.records import sql
from tests.fakes.refusals import refusal_of
from tests.fakes.runs import small_config
from tests.fakes.worker_runs import IssuedRun, issued_run, worker_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, server: EngineServer) -> Iterator[IssuedRun]:
    folder = tmp_path_factory.mktemp("run")
    environment = folder / "mine.py"
    environment.write_text((ENVIRONMENTS / "parity.py").read_text())
    name = {"name": f"{environment}:Parity"}
    place = folder / "replay.sqlite"
    with issued_run(worker_config(folder / "runs", server.models.folder, server, place, environment=name)) as run:
        yield run


def refusal(path: Path) -> str:
    return refusal_of(join_run, path, wait_s=0.0, note=str)


def test_a_worker_has_the_learners_tokens_and_notes_versions(run: IssuedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    joined = join_run(run.folder, wait_s=0.0, note=notes.append)
    with closing(joined.store):
        mine, learner = joined.actors, run.components.actors
        assert mine.renderer.codec.hash == learner.renderer.codec.hash
        assert (mine.renderer.stop_ids, mine.vocab_size) == (learner.renderer.stop_ids, learner.vocab_size)
        assert len(mine.renderer.stop_ids) == 51  # one of the tokenizer, fifty that only the generation config names
        assert notes == []
    monkeypatch.setattr("agentloop.workers.joined_run.version", lambda name: "9.9")
    join_run(run.folder, wait_s=0.0, note=notes.append).store.close()
    assert notes == ["the run was begun with version 0.1.0, this worker is 9.9"]


def test_a_run_not_there_not_begun_or_collecting_by_itself_is_refused(tmp_path: Path, server: EngineServer) -> None:
    assert refusal(tmp_path / "run-001").startswith("RUN must be there within --wait 0 s, got ")
    config = worker_config(tmp_path, server.models.folder, server, tmp_path / "replay.sqlite")
    assert "(the learner has not begun it)" in refusal(create_run_folder(config).path)
    alone = create_run_folder(small_config(tmp_path / "alone", tmp_path / "model"))
    assert refusal(alone.path).startswith("collection.by must be workers for agentloop worker, got loop in ")


@pytest.mark.parametrize(
    ("file", "changed", "said"),
    [
        ("../../mine.py", "{}\n# changed\n", "environment.name must have the source that the run has, got "),
        ("start/chat_template.jinja", "{} ", "template of a worker must be the run's, got "),
        ("start/tokenizer.json", None, "tokenizer of a worker must be the run's, got "),
    ],
)
def test_other_environment_or_tokenizer_is_refused(run: IssuedRun, file: str, changed: str | None, said: str) -> None:
    path = run.folder / file
    before = path.read_text()
    nfkc = json.dumps({**json.loads(before), "normalizer": {"type": "NFKC"}}) if changed is None else ""
    path.write_text(nfkc or str(changed).replace("{}", before))
    try:
        assert refusal(run.folder).startswith(said)
    finally:
        path.write_text(before)


def test_a_task_that_the_learner_has_not_is_refused(run: IssuedRun) -> None:
    run.issue(1)
    joined = join_run(run.folder, wait_s=0.0, note=str)
    with closing(joined.store):
        ticket = TicketRecord(run.id, 0, 0, "0" * 64, 1)
        with pytest.raises(UserError, match="tasks of a worker must be the learner's, got none with the hash 0000"):
            joined.tasks.tasks_for([ticket])


def test_a_database_of_another_schema_is_refused_without_a_wait(run: IssuedRun) -> None:
    place = run.store
    ((revision,),) = sql(place, "select version_num from replay_schema_version")
    sql(place, "update replay_schema_version set version_num = '0001'")
    try:
        with pytest.raises(ReplayError, match="database must have schema .*, got 0001 of an older agentloop"):
            join_run(run.folder, wait_s=600.0, note=str)
    finally:
        sql(place, "update replay_schema_version set version_num = ?", revision)
