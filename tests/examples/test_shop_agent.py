"""The shop's agent is judged by the value that was asked for, in words and of articles that it does not learn on."""

import json

import pytest

from agentloop import Task
from examples.shop_agent import make_data
from examples.shop_agent.shop import look_up
from tests.fakes.runs import ROOT


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("shop")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "examples").symlink_to(ROOT / "examples")
        make_data.main()
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
