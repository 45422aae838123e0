import gzip
import json
import math
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentloop.algorithms.baselines.grpo import group_advantages
from context.authors import DEMONSTRATION, INITIALIZATION
from context.tokens.codec import TokenCodec
from context.tokens.token_sequence import Segment
from replay import ReplayStore
from replay.exchange import ExchangeError, export_file
from replay.exchange.attach import attach, check_attachable
from replay.exchange.teacher import Teaching, import_chat, teaching_of
from replay.records import Trajectory
from tests.fakes import families as fakes
from tests.fakes.records import AUTHORS, RUN, sql

TOOLS = [{"type": "function", "function": {"name": "lookup", "description": "Look it up.", "parameters": {}}}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "lookup", "arguments": '{"key": "pearl"}'}}
ASKED = [{"role": "system", "content": "Be careful."}, {"role": "user", "content": "What is the code of pearl?"}]
ANSWER = {"role": "assistant", "content": "The code is 78."}
CALLED = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": '{"next": "78"}', "name": "lookup", "tool_call_id": "call00001"},
]
PLAIN = {"messages": [*ASKED, ANSWER], "reward": 1.0}


def teaching(store: ReplayStore, tmp_path: Path, name: str = "chatml", **options: Any) -> Teaching:
    return teaching_of(store, None, fakes.family(name).save(tmp_path / "model"), group_advantages, **options)


def written(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def only_row(store: ReplayStore) -> Trajectory:
    ((id,),) = sql(store, "select id from trajectories")
    return store.read([id])[0]


def codec_of(name: str = "chatml") -> TokenCodec:
    return fakes.family(name).codec


def replies_of(segment: Segment, name: str = "chatml") -> list[str]:
    trained = np.flatnonzero(np.diff([0, *AUTHORS.is_trained(segment.tokens.authors).astype(int), 0]))
    ids = segment.tokens.token_ids.tolist()
    return [codec_of(name).decode(ids[a:b]) for a, b in zip(trained[::2], trained[1::2], strict=True)]


@pytest.mark.parametrize("family", ["chatml", "llama3", "mistral"])
def test_replies_are_the_demonstrators_without_log_probs(file_store: ReplayStore, tmp_path: Path, family: str) -> None:
    row = {"messages": [*ASKED[1:], *CALLED, ANSWER], "tools": TOOLS, "reward": 0.5}
    report = import_chat(file_store, written(tmp_path, row), teaching(file_store, tmp_path, family))
    assert (report.inserted, report.replies) == (1, 2)
    found = only_row(file_store)
    (segment,) = found.segments
    authors = segment.tokens.authors
    assert {AUTHORS.name(code) for code in authors[AUTHORS.is_action(authors)].tolist()} == {DEMONSTRATION}
    assert np.isnan(segment.tokens.behavior_log_probs).all()
    end, call = fakes.family(family).end, fakes.family(family).call
    space = " " if family == "mistral" else ""
    assert replies_of(segment, family) == [call + end, f"{space}The code is 78.{end}"]
    record = found.record
    assert (record.source, record.reward, record.success, record.num_turns) == ("teacher", 0.5, False, 2)
    assert (record.num_tool_calls, record.stop_reason) == (1, "answered")
    assert math.isnan(record.mean_behavior_log_prob)
    assert [m.author for m in found.messages] == ["user", DEMONSTRATION, "env", DEMONSTRATION]


def test_examples_and_untrained_replies_are_shown_and_not_trained(file_store: ReplayStore, tmp_path: Path) -> None:
    example = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2.", "weight": 0}]
    middle = [{"role": "assistant", "content": "arrow", "weight": 0}, {"role": "user", "content": "And coral?"}]
    row = {"messages": [*example, *ASKED[1:], ANSWER, ASKED[1], *middle, ANSWER], "reward": 1}
    import_chat(file_store, written(tmp_path, row), teaching(file_store, tmp_path))
    found = only_row(file_store)
    assert replies_of(found.segments[0]) == ["The code is 78.<|im_end|>"] * 2
    assert [m.author for m in found.messages[:3]] == ["user", INITIALIZATION, "user"]
    shown = codec_of().decode(found.segments[0].tokens.token_ids.tolist())
    assert shown.index("2.<|im_end|>") < shown.index("arrow<|im_end|>")
    assert found.record.num_turns == 3


def test_rows_of_one_task_are_a_group(file_store: ReplayStore, tmp_path: Path) -> None:
    other = [{"role": "user", "content": "Who?"}, ANSWER]
    rows = [PLAIN, {**PLAIN, "reward": 0.0}, {"messages": other, "reward": 1.0}, {**PLAIN, "reward": 0.0}]
    report = import_chat(file_store, written(tmp_path, *rows), teaching(file_store, tmp_path))
    assert (report.groups, report.without_signal) == (2, 1)
    found = sql(
        file_store,
        "select t.slot, t.member, g.size, g.reward_mean, g.success_rate, t.advantage "
        'from trajectories t join "groups" g on t.group_id = g.id order by t.slot',
    )
    # Rewards 1, 0, 0: mean 1/3, sample standard deviation sqrt((4 + 1 + 1) / 9 / 2) = 1 / sqrt(3).
    high, low = (2 / 3) / (3**-0.5 + 1e-6), (-1 / 3) / (3**-0.5 + 1e-6)
    assert [row[:2] for row in found] == [(0, 0), (1, 1), (2, 0), (3, 2)]
    assert found[0][2:] == pytest.approx((3, 1 / 3, 1 / 3, high))
    assert found[1][2:] == pytest.approx((3, 1 / 3, 1 / 3, low))
    assert found[2][2:] == (1, 1.0, 1.0, 0.0)


def test_reward_and_advantage_can_be_given(file_store: ReplayStore, tmp_path: Path) -> None:
    path = written(tmp_path, {"messages": PLAIN["messages"]}, {**PLAIN, "reward": 0.25, "success": True})
    with pytest.raises(ExchangeError, match=r"chat.jsonl:1: row must hold a reward, got none.*--reward"):
        import_chat(file_store, path, teaching(file_store, tmp_path))
    report = import_chat(file_store, path, teaching(file_store, tmp_path, reward=0.75, advantage=1.5))
    assert report.without_signal == 0
    found = sql(file_store, "select reward, success, advantage from trajectories order by slot")
    assert found == [(0.75, 0, 1.5), (0.25, 1, 1.5)]


def test_an_import_is_stored_once_and_a_changed_file_is_another_set(file_store: ReplayStore, tmp_path: Path) -> None:
    path = written(tmp_path, PLAIN)
    assert import_chat(file_store, path, teaching(file_store, tmp_path)).inserted == 1
    report = import_chat(file_store, path, teaching(file_store, tmp_path))
    assert (report.inserted, report.duplicates) == (0, 1)
    written(tmp_path, PLAIN, PLAIN)
    assert import_chat(file_store, path, teaching(file_store, tmp_path)).inserted == 2


def test_other_files_and_conversations_beyond_the_context_are_refused(file_store: ReplayStore, tmp_path: Path) -> None:
    made = teaching(file_store, tmp_path)
    small = replace(made, run=replace(made.run, config={"context": {"max_tokens": 20}}))
    with pytest.raises(ExchangeError, match="conversation must fit context.max_tokens"):
        import_chat(file_store, written(tmp_path, PLAIN), small)
    for ending in ("json", "parquet", "txt"):
        path = tmp_path / f"conversations.{ending}"
        path.write_text(json.dumps([PLAIN]))
        with pytest.raises(ExchangeError, match=r"^FILE must end in \.jsonl.*one row a line\.$"):
            import_chat(file_store, path, made)


def test_a_run_without_a_tokenizer_is_refused(file_store: ReplayStore) -> None:
    with pytest.raises(ExchangeError, match="RUN must be a run's folder, with its tokenizer and chat template, got"):
        teaching_of(file_store, None, None, group_advantages)


@pytest.mark.parametrize(("own", "reward", "advantage"), [({}, 1.0, 1.0), ({"reward": 0.5}, 0.5, 0.0)])
def test_attached_file_without_rewards_is_demonstrations(
    file_store: ReplayStore, tmp_path: Path, own: dict[str, float], reward: float, advantage: float
) -> None:
    path, teach = written(tmp_path, {"messages": [*ASKED, ANSWER], **own}), partial(teaching, file_store, tmp_path)
    check_attachable(str(path))
    for inserted in (1, 0):
        assert attach(file_store, RUN, "shown", str(path), teach=teach).inserted == inserted
    assert sql(file_store, "select source, reward, advantage from trajectories") == [("shown", reward, advantage)]
    export_file(file_store, tmp_path / "rows.parquet")
    with closing(ReplayStore.create(tmp_path / "other.sqlite")) as other:
        assert attach(other, RUN, "rows", str(tmp_path / "rows.parquet"), teach=teach).inserted == 1


def test_attached_file_that_can_not_be_read_is_refused(file_store: ReplayStore, tmp_path: Path) -> None:
    with pytest.raises(ExchangeError, match="FILE must be readable, got .*none.jsonl"):
        check_attachable(str(tmp_path / "none.jsonl"))
    path = written(tmp_path, [1])
    with pytest.raises(ExchangeError, match="chat.jsonl:1: row must"):
        attach(file_store, RUN, "shown", str(path), teach=partial(teaching, file_store, tmp_path))
    packed = tmp_path / "chat.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(PLAIN).encode())[:-9])
    with pytest.raises(ExchangeError, match="chat.jsonl.gz:1: contents must unpack") as refused:
        attach(file_store, RUN, "shown", str(packed), teach=partial(teaching, file_store, tmp_path))
    assert "--" not in str(refused.value)
