"""The pages for people who come from TRL or verl name keys that exist, and what they show runs."""

import re
from pathlib import Path

import datasets
import pytest

from agentloop.config.config_file import load_config
from agentloop.config.keys import KEY_OF_NAME_ELSEWHERE, Key, schema_entries
from agentloop.environments import Task, open_tasks
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.rewards import open_scorer
from context.authors import LLM
from context.messages import Message
from examples import from_trl
from tests.docs.blocks import ROOT, blocks, tables
from tests.fakes.runs import rows

PAGES = {name: ROOT / "docs" / f"coming-from-{name}.md" for name in ("trl", "verl")}
SECTIONS = {path[0] for path, entry in schema_entries().items() if isinstance(entry, str)}


def cells(page: str) -> list[tuple[list[str], str]]:
    """The names in the first cell of each row, and the text of the second."""
    both = [tuple(row.values()) for each in tables(PAGES[page]) for row in each]
    return [(re.findall(r"`([\w.]+)`", theirs), ours) for theirs, ours in both]


def is_key(dotted: str) -> bool:
    """Whether it is a key, or an option of a key whose value has options."""
    path = tuple(dotted.split("."))
    above = schema_entries().get(path[:-1])
    is_option = isinstance(above, Key) and above.free and (not above.kinds or any(path[-1] in k for k in above.kinds))
    return path in schema_entries() or is_option


@pytest.mark.parametrize("page", PAGES)
def test_keys_of_ours_exist_and_are_those_that_errors_name(page: str) -> None:
    keys = {name for _, ours in cells(page) for name in re.findall(r"`(\w+\.[\w.]+)", ours)}
    ours = {key for key in keys if key.partition(".")[0] in SECTIONS}
    assert len(ours) > 40 and [key for key in ours if not is_key(key)] == []
    both = [(name.rpartition(".")[2], there) for theirs, there in cells(page) for name in theirs]
    named = [(KEY_OF_NAME_ELSEWHERE[name], there) for name, there in both if name in KEY_OF_NAME_ELSEWHERE]
    assert len(named) > 12 and [key for key, there in named if key not in there] == []


def answered(row: dict[str, object], said: str) -> Episode:
    task = Task("Question?", row)
    return Episode.answered(task, (*task.messages(), Message("assistant", said, author=LLM)), 0.0)


def test_reward_function_of_trl_judges_an_episode_as_there() -> None:
    row = from_trl.ROWS[0]
    assert [from_trl.right_here(answered(row, said), **row) for said in ("20 ", "21")] == [1.0, 0.0]


@pytest.mark.slow
def test_example_for_trl_trains(tmp_path: Path, qwen2: Path) -> None:
    run = from_trl.train(qwen2, run={"iterations": 2, "folder": str(tmp_path)}, evaluation={"tasks": 4})
    assert rows(run.folder / "replay.sqlite", "select count(*), sum(reward) is null from trajectories") == [(128, 0)]


def test_rows_and_a_reward_function_of_verl_are_read_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (python,), (config,) = (
        [b for b in blocks() if b.place.startswith("docs/coming-from-verl") and b.language == name]
        for name in ("python", "yaml")
    )
    (tmp_path / "my_rewards.py").write_text(
        "def compute_score(source, said, truth, extra):\n    return float(said == truth)\n"
    )
    (tmp_path / "score.py").write_text(python.text)
    (tmp_path / "run.yaml").write_text(config.text)
    (tmp_path / "data").mkdir()
    prompt, extra = [{"role": "user", "content": "2 + 2?"}], {"split": "train", "index": 0}
    row = {
        "data_source": "sums",
        "prompt": prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": extra,
    }
    for split in ("train", "test"):
        datasets.Dataset.from_list([row]).to_parquet(tmp_path / "data" / f"{split}.parquet")
    monkeypatch.chdir(tmp_path)
    loaded = load_config(Path("run.yaml"))
    environments, tasks = open_tasks(loaded)
    task = tasks.train(0)
    assert [message.content for message in task.messages()] == ["2 + 2?"] and task.payload == row
    scores = open_scorer(loaded, environments).score([answered(row, said) for said in ("4", "5")])
    assert scores.totals == [1.0, 0.0]
