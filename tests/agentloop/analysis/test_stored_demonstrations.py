"""What a run did well is written as conversations that `agentloop sft` reads."""

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import agentloop
from agentloop.analysis.stored_demonstrations import write_demonstrations
from agentloop.environments import RunEnvironments, load_environment, open_tasks
from agentloop.runs.run_folder import open_run_folder
from agentloop.training.train import TrainResult
from context.authors import HISTORY, LLM
from context.messages import Message, content_hash, to_template
from context.tokens.session_segments import sequences_of
from replay.errors import ReplayError
from replay.exchange import ExportReport
from replay.exchange.openai_chat import Conversation, read_line
from replay.questions.filters import condition
from replay.records import Trajectory
from replay.store import ReplayStore
from tests.agentloop.training.test_from_python import ROWS, small
from tests.fakes.environments import functions
from tests.fakes.random_agents import TOOLS
from tests.fakes.records import new_store, planned_row, put, session_row, trajectory
from tests.fakes.runs import rows

FILE = Path(functions.__file__)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> TrainResult:
    return agentloop.train(
        model=qwen2, tools=[f"{FILE}:look"], reward=f"{FILE}:even", tasks=ROWS, **small(tmp_path_factory.mktemp("runs"))
    )


def written(run: TrainResult, file: Path, where: str, *, version: str | None = None) -> ExportReport:
    folder = open_run_folder(run.folder)
    environments, _ = open_tasks(folder.config, folder.environments)
    if version is not None:
        environments = environments.with_version_of(version)
    with closing(ReplayStore.open(folder.database, read_only=True)) as store:
        return write_demonstrations(store, environments, file, where=condition(where))


def stored(run: TrainResult, where: str) -> list[list[dict[str, Any]]]:
    ids = rows(run.folder / "replay.sqlite", f"select id from trajectories where {where} order by iteration, slot, id")
    with closing(ReplayStore.open(run.folder / "replay.sqlite", read_only=True)) as store:
        said = {row.id: row.messages for row in store.read([id for (id,) in ids])}
    return [[to_template(message) for message in said[id]] for (id,) in ids]


def read(file: Path) -> list[list[dict[str, Any]]]:
    """The messages of each conversation, as sft reads them."""
    found = []
    for line in file.read_bytes().splitlines():
        conversation = read_line(line, Counter())
        turns = [(reply.message, *after) for reply, after in conversation.turns]
        found.append([to_template(m) for m in (*conversation.opening, *(m for turn in turns for m in turn))])
        assert [tool["function"]["name"] for tool in conversation.tools] == ["look"]
    return found


def test_answered_rows_are_read_as_they_were_said(run: TrainResult, tmp_path: Path) -> None:
    everything, wins = tmp_path / "all.jsonl", tmp_path / "wins.jsonl.gz"
    found = written(run, everything, "reward >= 0")
    expected = stored(run, "stop_reason = 'answered'")
    assert expected
    assert (found.rows, found.corrupt) == (len(expected), {})
    assert read(everything) == expected
    assert written(run, wins, "success").rows == len(stored(run, "stop_reason = 'answered' and success"))
    # Tools of another version are not known.
    assert written(run, tmp_path / "other.jsonl", "reward >= 0", version="another").rows == 0
    with pytest.raises(ReplayError, match=r"FILE must end in \.jsonl or \.jsonl\.gz, got "):
        written(run, tmp_path / "wins.parquet", "success")


def test_examples_in_a_prompt_are_shown_and_not_taught(tmp_path: Path) -> None:
    asked, example = Message("user", "And 2 times 3?"), Message("assistant", "It is 4.", HISTORY)
    said = (Message("user", "What is 2 times 2?"), example, asked, Message("assistant", "It is 6.", LLM))
    row = trajectory("t1", messages=said, stop_reason="answered")
    environments = RunEnvironments({"lookup_chain": load_environment("lookup_chain", {})})
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        put(store, row)
        write_demonstrations(store, environments, tmp_path / "wins.jsonl", where=condition("success"))
    conversation = read_line((tmp_path / "wins.jsonl").read_bytes(), Counter())
    assert [message.content for message in conversation.opening] == ["What is 2 times 2?", "It is 4.", "And 2 times 3?"]
    assert [reply.message.content for reply, _ in conversation.turns] == ["It is 6."]


def session_lines(folder: Path, *sessions: Trajectory) -> list[Conversation]:
    """What sft reads of these sessions, which are all that is known of their environment."""
    with closing(new_store(folder / "replay.sqlite")) as store:
        put(store, *sessions)
        write_demonstrations(store, None, folder / "wins.jsonl", where=condition("success"))
    return [read_line(line, Counter()) for line in (folder / "wins.jsonl").read_bytes().splitlines()]


def test_each_sequence_of_a_session_is_a_conversation_and_each_reply_is_taught_once(tmp_path: Path) -> None:
    lines = session_lines(tmp_path, planned_row("agents", stop_reason="answered"))
    taught = [[reply.message.content for reply, _ in line.turns if reply.trained] for line in lines]
    assert taught == [["It is 78."], ["I ask.", "I ask again.", "78, then."], ["The code is 78."]]
    assert [line.task for line in lines] == ["Where is pearl?", "Find pearl.", "So far: 78. Go on."]


def test_sessions_are_written_with_the_tools_they_offered(tmp_path: Path) -> None:
    rows = [session_row(f"row-{seed}", seed, slot=seed, stop_reason="answered") for seed in (3, 6, 9)]
    lines = iter(session_lines(tmp_path, *rows))
    for row in rows:
        trained = [node for node in row.nodes if node.is_trained]
        told: list[str] = []
        for leaf, line in zip(sequences_of(row.nodes), lines, strict=False):
            assert line.tools == ([] if row.nodes[leaf].place.tools == content_hash([]) else TOOLS)
            told += [reply.message.content for reply, _ in line.turns if reply.trained]
        assert sorted(told) == sorted(node.messages[-1].content for node in trained)
    assert next(lines, None) is None
