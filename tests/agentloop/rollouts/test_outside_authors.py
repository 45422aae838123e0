"""A run whose tasks open with the words of registered authors, from the shell to the buffer and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from agentloop.cli.main import main
from context import AuthorTable, loss_mask, response_mask
from replay import ReplayStore
from replay.records import Trajectory
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.runs import rows, save_qwen2, small_config
from tests.fakes.scripted import CHATML

EDITED = f"{ENVIRONMENTS / 'edited.py'}:Edited"
SPEAKERS = [
    {"name": "human_edit", "action": True, "trained": True},
    {"name": "subagent:planner", "action": True},
    {"name": "judge", "shown": False},
]


pytestmark = pytest.mark.slow


def typed(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["agentloop", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edited")
    config = small_config(
        folder / "runs",
        save_qwen2(folder / "qwen2"),
        environment={"name": EDITED},
        context={"max_tokens": 600, "authors": SPEAKERS},
        loss={"replay": {"anchor": "old"}},
        run={"iterations": 2},
        batch={"trajectories": 8},
        evaluation={"every": 0, "tasks": 4},
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    with pytest.MonkeyPatch.context() as patch:
        assert typed(patch, "train", str(folder / "run.yaml")) == 0
    return folder / "runs" / "small-001"


@pytest.fixture(scope="module")
def stored(run: Path) -> tuple[list[Trajectory], AuthorTable]:
    store = ReplayStore.open(run / "replay.sqlite", read_only=True)
    (run_id,) = {str(name) for (name,) in rows(run / "replay.sqlite", "select id from runs")}
    ids = [str(id) for (id,) in rows(run / "replay.sqlite", "select id from trajectories")]
    found = store.read(ids), AuthorTable.from_json(store.run(run_id).authors)
    store.close()
    return found


def test_stored_rows_say_who_spoke_and_know_no_log_probs_for_it(
    run: Path, stored: tuple[list[Trajectory], AuthorTable]
) -> None:
    trajectories, table = stored
    drawn = "select count(*) from draws where stream = 'replay' and state = 'committed'"
    assert rows(run / "replay.sqlite", drawn)[0][0] > 0
    assert [author.name for author in table.authors[-3:]] == ["human_edit", "subagent:planner", "judge"]
    assert len(trajectories) == 8 + 6  # the second iteration drew a quarter of its batch from the first
    for trajectory in trajectories:
        (segment,) = trajectory.segments
        tokens = segment.tokens
        edited, planned = (tokens.authors == table.code(name) for name in ("human_edit", "subagent:planner"))
        assert CHATML.codec.decode(tokens.token_ids[edited].tolist()) == "Behind 7 comes 8.<|im_end|>"
        assert CHATML.codec.decode(tokens.token_ids[planned].tolist()) == (
            '<tool_call>\n{"name": "lookup", "arguments": {"key": "pearl"}}\n</tool_call><|im_end|>'
        )
        sampled = tokens.authors == table.code("llm")
        assert sampled.any()
        assert (response_mask(tokens, table) == edited | planned | sampled).all()
        assert (loss_mask(tokens, table) == edited | sampled).all()
        assert (np.isnan(tokens.behavior_log_probs) == ~sampled).all()
        assert ((tokens.policy_versions == -1) == ~sampled).all()
        assert "secret" not in CHATML.codec.decode(tokens.token_ids.tolist())
        authors = [message.author for message in trajectory.messages]
        assert authors[1] == "human_edit" and authors[3] == "subagent:planner" and authors[6] == "judge"
