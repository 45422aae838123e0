"""A run whose tasks open with the words of registered authors, to the buffer and back."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from agentloop.training.train import train
from context import AuthorTable, loss_mask, response_mask
from replay import ReplayStore
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.runs import SilentDisplay, rows, save_qwen2, small_config
from tests.fakes.scripted import CHATML

EDITED = f"{ENVIRONMENTS / 'parity.py'}:Edited"
SPEAKERS = [
    {"name": "human_edit", "action": True, "trained": True},
    {"name": "subagent:planner", "action": True},
    {"name": "judge", "shown": False},
]


pytestmark = pytest.mark.slow


def test_stored_rows_say_who_spoke_and_know_no_log_probs_for_it(tmp_path: Path) -> None:
    config = small_config(
        tmp_path / "runs",
        save_qwen2(tmp_path / "qwen2"),
        environment={"name": EDITED},
        context={"max_tokens": 600, "authors": SPEAKERS},
        loss={"replay": {"anchor": "old"}},
        run={"iterations": 2},
        batch={"trajectories": 8},
        evaluation={"every": 0, "tasks": 4},
    )
    buffer = train(config, display=SilentDisplay()).folder / "replay.sqlite"
    drawn = "select count(*) from draws where stream = 'replay' and state = 'committed'"
    assert rows(buffer, drawn)[0][0] > 0
    with closing(ReplayStore.open(buffer, read_only=True)) as store:
        table = AuthorTable.from_json(store.run(str(rows(buffer, "select id from runs")[0][0])).authors)
        trajectories = store.read([str(id) for (id,) in rows(buffer, "select id from trajectories")])
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
