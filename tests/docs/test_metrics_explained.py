"""docs/reading-a-run.md explains every metric that a run logs, and no other."""

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentloop.training.advantage_estimator import AdvantageEstimator
from agentloop.training.train import train
from tests.docs.blocks import ROOT, tables
from tests.docs.test_errors_page import nodes, text
from tests.fakes.batch_rows import row, segment
from tests.fakes.runs import SilentDisplay, rows, small_config
from tests.fakes.tiny_actors import run_config, tiny_actor, trainer

PAGE = ROOT / "docs" / "reading-a-run.md"
_TENSORS = ("optimizer/", "weights/")
"""Begin the names of tensors in a checkpoint."""
_NAME = re.compile(r"[a-z_]+(?:/[^/\s]+)+")


def explained() -> list[str]:
    """Names in the first cells of the page's tables. `<stream>` stands for any part, `{a,b}` for both."""
    cells = [line["metric"] for table in tables(PAGE) if "metric" in table[0] for line in table]
    codes = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    return [name for code in codes for name in _alternatives(code)]


def _alternatives(name: str) -> Iterator[str]:
    before, brace, rest = name.partition("{")
    if not brace:
        yield name
        return
    choices, _, after = rest.partition("}")
    for choice in choices.split(","):
        yield from _alternatives(before + choice + after)


def pattern(name: str) -> re.Pattern[str]:
    return re.compile("".join("[^/]+" if i % 2 else re.escape(it) for i, it in enumerate(re.split("<(.+?)>", name))))


def written() -> set[str]:
    """Names the code gives to metrics: keys of dictionaries, and what is assigned to; a value in one is `<value>`."""
    names: set[str] = set()
    for _, node in nodes():
        keys: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            keys = list(node.keys)
        elif isinstance(node, ast.DictComp):
            keys = [node.key]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys = [node.slice]
        found = [name.replace("<>", "<value>") for key in keys if key and (name := text(key))]
        names |= {name for name in found if _NAME.fullmatch(name)}
    return {name for name in names if not name.startswith(_TENSORS)}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> set[str]:
    """By a run with replay and one with a critic."""
    folder = tmp_path_factory.mktemp("runs")
    short: dict[str, Any] = {
        "run": {"iterations": 2},
        "rollout": {"max_turns": 1, "max_tokens_per_turn": 12},
        "evaluation": {"every": 2, "tasks": 2},
        "checkpoint": {"every": 2, "keep_policies": "none"},
    }
    correction = {"kind": "truncate", "ratio_high": 2.0}
    runs = {"grpo": {"loss": {"replay": {"anchor": "old", "correction": correction}}}, "ppo": {}}
    names = set()
    for algorithm, sections in runs.items():
        config = small_config(folder / algorithm, qwen2, algorithm, kl={"reward_coef": 0.01}, **short, **sections)
        result = train(config, display=SilentDisplay())
        names |= {name for (name,) in rows(result.folder / "replay.sqlite", "select distinct name from metrics")}
    return names


def test_every_metric_of_a_run_is_explained(logged: set[str]) -> None:
    patterns = [pattern(name) for name in explained()]
    assert {"actor/replay/ess/age_1", "critic/vf_loss", "actor/reward_kl", "eval/success"} <= logged
    assert sorted(name for name in logged if not any(p.fullmatch(name) for p in patterns)) == []


def test_every_metric_that_the_code_names_is_explained() -> None:
    """Also those that only other settings log."""
    patterns = [pattern(name) for name in explained()]
    names = written()
    assert {"rollout/greedy_reward", "actor/<value>/rejected", "buffer/evicted_by_<value>"} <= names
    examples = [re.sub("<.+?>", "value", name) for name in explained()]
    unknown = [name for name in names if not any(p.fullmatch(name) for p in patterns)]
    # A name that ends in what only a run knows, as `drift_<value>`, is explained where each of its endings is.
    assert sorted(name for name in unknown if not any(pattern(name).fullmatch(one) for one in examples)) == []


def test_every_metric_that_is_explained_is_one(logged: set[str]) -> None:
    known = [pattern(name) for name in logged | written()]
    examples = {name: re.sub("<.+?>", "value", name) for name in explained()}
    logged_as = {name: [other for other in logged if pattern(name).fullmatch(other)] for name in examples}
    unlogged = [name for name in examples if not logged_as[name]]
    assert [name for name in unlogged if not any(p.fullmatch(examples[name]) for p in known)] == []
    assert len(explained()) == len(set(explained()))


def test_policy_loss_of_a_short_success_and_a_long_failure_is_positive() -> None:
    """The page's example: 5 and 10 tokens, advantages +-0.707, ratio 1: -(5 - 10) x 0.707 / 15 = +0.236."""
    members = [row("success", segment("uu" + 5 * "l")), row("failure", segment("uu" + 10 * "l", seed=1))]
    config = run_config(algorithm="grpo", batch={"group_size": 2})
    grouped = AdvantageEstimator(config).advantages_for_groups([item.trajectory for item in members], [1.0, 0.0])
    valued = [replace(item, advantage=v.record.advantage) for item, v in zip(members, grouped, strict=True)]
    metrics = trainer(tiny_actor(), run_config()).update(valued, iteration=1).metrics
    assert metrics["actor/fresh/pg_loss"] == pytest.approx(5 * math.sqrt(0.5) / 15, abs=1e-5)
    assert "+0.236" in PAGE.read_text(encoding="utf-8")
