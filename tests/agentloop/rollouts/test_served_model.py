"""Evaluations of a model behind an address: a real server is asked with messages and tools, and its replies play."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from agentloop.analysis.stored_policies import Asked, ServedModel, evaluate_model
from agentloop.errors import UserError
from agentloop.rollouts.evaluation import EvaluationReport
from tests.fakes.environments import functions
from tests.fakes.scripted_http import ScriptedServer, scripted_server

KINDS = ("right", "half", "wrong", "cut", "odd", "lost")
TURNS = itertools.count()


def reply(body: Any) -> tuple[int, Any]:
    """Answer the task whose kind its question names: look up its code first, and then say it, if it is so."""
    question, *said = (message["content"] for message in body["messages"])
    kind = question.split()[0]
    if kind == "lost":
        return 400, {"error": {"message": "no"}}
    arguments = "{" if kind == "odd" else json.dumps({"key": "code"})
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    message: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
    if said:
        wrong = kind == "wrong" or (kind == "half" and next(TURNS) % 2)
        message = {"role": "assistant", "content": "no idea" if wrong else said[-1]}
    finish = "length" if kind == "cut" else "stop"
    choice = {"index": 0, "finish_reason": finish, "message": message}
    return 200, {"id": "x", "created": 1, "model": "m", "choices": [choice]}


ROWS = {"name": "rows", "tools": [f"{functions.__file__}:look"]}


def evaluated(
    folder: Path, model: Path, server: ScriptedServer, environment: dict[str, Any] = ROWS
) -> EvaluationReport:
    rows = [{"prompt": f"{kind} one?", "kind": kind, "answer": "78", "store": {"code": "78"}} for kind in KINDS]
    text = "".join(json.dumps({**row, "split": split}) + "\n" for row in rows for split in ("train", "held_out"))
    (folder / "rows.jsonl").write_text(text)
    config: dict[str, Any] = {"model": {"path": str(model)}, "environment": environment}
    config["tasks"] = {"data": str(folder / "rows.jsonl"), "held_out": "held_out"}
    config["reward"] = {"functions": [{"function": f"{functions.__file__}:right"}]}
    config["context"], config["rollout"] = {"max_tokens": 2000}, {"max_tokens_per_turn": 200}
    (folder / "run.yaml").write_text(json.dumps(config))
    server.answers["/v1/chat/completions"] = reply
    served = ServedModel(f"{server.url}/v1", "large", "secret")
    return evaluate_model(folder / "run.yaml", asked=Asked(samples=4, by="kind", served=served))


def test_a_served_model_is_evaluated_by_messages_and_reported_by_category(
    tmp_path: Path, qwen2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted_server() as server:
        found, again = (evaluated(tmp_path, qwen2, server).to_json() for _ in range(2))
    assert "computing on" not in capsys.readouterr().err  # the policy's model is loaded for its template alone
    assert found["run"] == f"large at {server.url}/v1" and server.keys == {"Bearer secret"}
    success = {"right": 1.0, "half": 0.5, "wrong": 0.0, "cut": 0.0, "odd": 0.0}
    assert {kind: share["value"] for kind, share in found["categories"].items()} == success
    assert (found["by"], found["tasks"], found["engine_failures"]) == ("kind", 5, 4)  # nobody knows what is lost
    ends = {task["category"]: {one["stop_reason"] for one in task["outcomes"]} for task in found["per_task"]}
    assert ends == {kind: {"truncated" if kind == "cut" else "answered"} for kind in success}
    # of 4 samples two succeed: pass^2 is C(2, 2) / C(4, 2) = 1 / 6, and pass@2 is 5 / 6
    assert found["pass_hat_k"]["2"]["value"] == pytest.approx((1 + 1 / 6 + 0 + 0 + 0) / 5)
    assert found["pass_at_k"]["2"]["value"] == pytest.approx((1 + 5 / 6 + 0 + 0 + 0) / 5)
    assert [task["task"] for task in again["per_task"]] == [task["task"] for task in found["per_task"]]
    assert all(task["samples"] == len(task["outcomes"]) == 4 for task in found["per_task"])
    bodies = [body for _, body in server.asked]
    assert {tool["function"]["name"] for body in bodies for tool in body["tools"]} == {"look"}
    _, called, result = next(body["messages"] for body in bodies if len(body["messages"]) == 3)
    assert called["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"key": "code"}'}
    assert (result["tool_call_id"], result["content"]) == (called["tool_calls"][0]["id"], "78")


def test_a_served_model_plays_no_agent(tmp_path: Path, qwen2: Path) -> None:
    with scripted_server() as server, pytest.raises(UserError, match="--url must be for environments without an agent"):
        evaluated(tmp_path, qwen2, server, {"agent": "true"})
