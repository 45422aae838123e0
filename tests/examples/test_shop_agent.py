"""The shop's agent is judged by the value that was asked for, in words and of articles that it does not learn on."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from agentloop import Task
from agentloop.config import RunConfig
from agentloop.environments import load_environment
from agentloop.rollouts.demonstrated import demonstrate
from examples.shop_agent import make_data, make_dialogues
from examples.shop_agent.shop import look_up
from replay.exchange.openai_chat import read_line
from tests.agentloop.rollouts.collecting import collect
from tests.fakes.runs import ROOT
from tests.fakes.scripted import call, scripted_actors


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("shop")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "examples").symlink_to(ROOT / "examples")
        make_data.main()
        make_dialogues.main()
        dialogues = [read_line(line, Counter()) for line in make_dialogues.DIALOGUES.open("rb")]
    assert len(dialogues) == 128 and {len(dialogue.turns) for dialogue in dialogues} == {4, 5, 6, 7, 8}
    return {
        name: [json.loads(line) for line in (folder / make_data.FOLDER / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "test", "demonstrations")
    }


def test_every_question_has_the_answer_that_the_tool_gives(made: dict[str, list[dict]]) -> None:
    for row in made["train"] + made["test"]:
        assert look_up(row["article"], row["field"], Task(row["question"], row)) == row["answer"]
        assert row["article"] in row["question"]
    with pytest.raises(KeyError, match="no article is named 'moon'"):
        look_up("moon", "price", Task("", made["train"][0]))


def test_no_article_and_no_wording_is_both_learned_and_judged_by(made: dict[str, list[dict]]) -> None:
    for part in (lambda row: row["question"].replace(row["article"], ""), lambda row: row["article"].split()[1]):
        learned, judged = ({part(row) for row in made[split]} for split in ("train", "test"))
        assert learned and judged and not learned & judged


def test_demonstrations_have_the_prompt_and_tool_of_the_run_and_half_are_right(made: dict[str, list[dict]]) -> None:
    fields = {row["question"]: row["field"] for row in made["train"]}
    asked = []
    for line in made["demonstrations"]:
        system, user, call, result, answer = line["messages"]
        assert system["content"].startswith("You work in a shop.") and result["content"] == answer["content"]
        assert [tool["function"]["name"] for tool in line["tools"]] == ["look_up"]
        looked_up = json.loads(call["tool_calls"][0]["function"]["arguments"])
        asked.append(looked_up["field"] == fields[user["content"]])
    assert 0.4 < sum(asked) / len(asked) < 0.6


def test_service_desk_rewards_the_database_and_what_the_customer_was_told() -> None:
    desk = load_environment(f"{ROOT / 'examples/shop_agent/service_desk.py'}:ServiceDesk", {})
    tasks = [desk.make_task(random.Random(number)) for number in range(12)]
    whole, careless = [], []
    for task in tasks:
        said = [m for m in demonstrate(desk, desk.create(), task, random.Random(0)) if m.author == "llm"]
        replies = [m.content or call(m.tool_calls[0].name, json.dumps(dict(m.tool_calls[0].arguments))) for m in said]
        whole.append(replies)
        of_another = json.dumps({"order": [*task.payload["orders"]][-1], "status": "cancelled"})
        careless.append([*replies[:2], call("close_order", of_another), *replies[2:]])
    config = RunConfig.model_validate(
        {"rollout": {"max_turns": 10, "max_tokens_per_turn": 400}, "context": {"max_tokens": 20_000}}
    )
    everything = [*whole, *careless, *([*replies[:-1], "Bye."] for replies in whole)]
    rows = collect(scripted_actors(desk, everything), [(task, 1) for task in tasks * 3], config).trajectories
    assert {row.record.stop_reason for row in rows} == {"answered"}
    # With the last of two answers left out, half of the facts count by half.
    unsaid = [0.5 * (len(task.payload["wishes"]) - 1) / len(task.payload["wishes"]) for task in tasks]
    assert [row.record.reward for row in rows] == [1.0] * 12 + [0.0] * 12 + unsaid and set(unsaid) == {0.0, 0.25}
    assert {sum(m.author == "user" for m in row.messages) for row in rows} == {2, 3}
    # A limit that ends a dialogue after all was said leaves half of the reward, and no success.
    short = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_turns": len(whole[0])})})
    (row,) = collect(scripted_actors(desk, whole[:1]), [(tasks[0], 1)], short).trajectories
    assert (row.record.stop_reason, row.record.reward, row.record.success) == ("max_turns", 0.5, False)


@pytest.mark.slow
def test_copied_folders_run_outside_of_the_checkout(tmp_path: Path) -> None:
    """With chat_rows.py, as docs/small-model.md says."""
    for name in (folders := ["shop_agent", "calculator_agent", "coding_agent", "sql_agent", "gateway_agents"]):
        shutil.copytree(ROOT / "examples" / name, tmp_path / "examples" / name)
    shutil.copy(ROOT / "examples" / "chat_rows.py", tmp_path / "examples")
    for package in ("context", "replay", "agentloop"):
        (tmp_path / "installed").mkdir(exist_ok=True)
        (tmp_path / "installed" / package).symlink_to(ROOT / package)
    made = f"import {', '.join(f'examples.{name}.make_data' for name in folders)}; examples.shop_agent.make_data.main()"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    subprocess.run([sys.executable, "-c", made], cwd=tmp_path, env=environment, check=True)
    assert len((tmp_path / "runs" / "shop_agent" / "demonstrations.jsonl").read_text().splitlines()) == 128
