"""What --trace-step prints: every role's outputs under both names, with the numbers of the batch itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from agentloop.learning.batch import ScoredBatch
from agentloop.training.trace import describe_batch
from agentloop.training.train import train
from replay.records import BatchRow
from tests.fakes.batch_rows import row, run_config, segment, tiny_actor, trainer
from tests.fakes.runs import SilentDisplay, save_qwen2, small_config

NAMES = {
    "token_ids": "responses",
    "behavior_log_probs": "rollout_log_probs",
    "replay_mask": "exp_mask",
    "old_log_probs": "old_log_probs",
    "entropies": "entropys",
    "ref_log_probs": "ref_log_prob",
    "scores": "token_level_scores",
    "rewards": "token_level_rewards",
    "values": "values",
    "returns": "returns",
    "advantages": "advantages",
    "response_mask": "response_mask",
    "loss_mask": "loss_mask",
}


def described(
    algorithm: str, rows: list[BatchRow], *, penalised: bool = False
) -> tuple[list[str], dict[str, list[str]], ScoredBatch]:
    """The lines of a trace of an update of these rows, the words behind each array's two names, and their batch."""
    kl = {"reward_coef": 0.1} if algorithm == "ppo" else {}
    learner = trainer(tiny_actor(), run_config(algorithm=algorithm, kl=kl), reference=tiny_actor(seed=1))
    shown: list[ScoredBatch] = []
    learner.update(rows, iteration=1, before_steps=shown.append)
    text = describe_batch(shown[0], penalised=penalised, text=lambda ids: f"<{ids[0]}>").splitlines()
    words = [line.split() for line in text[5:]]
    assert {cells[1]: cells[2] for cells in words} == NAMES
    return text, {cells[1]: cells[3:] for cells in words}, shown[0]


TWO = [row("first", segment("uulllllll")), row("second", segment("ull"), stream="replay")]


def test_trace_shows_the_fresh_trajectory_with_the_highest_reward() -> None:
    rows = []
    for name, reward in {"fails": 0.0, "replay": 1.0, "new": 1.0}.items():
        given = row(name, segment("ull", seed=len(name)), stream="replay" if name == "replay" else "fresh")
        record = replace(given.trajectory.record, reward=reward, success=reward == 1.0)
        rows.append(replace(given, trajectory=replace(given.trajectory, record=record)))
    text, *_ = described("grpo", rows)
    assert "(trajectory new, fresh, success, reward" in text[2]


def test_trace_shows_what_the_optimizer_steps_see() -> None:
    _, lines, scored = described("ppo", TWO)
    assert scored.critic is not None
    for name, values in (("advantages", scored.batch.advantages), ("rewards", scored.critic.rewards)):
        assert lines[name][:2] == ["[2,", "9]"]
        # Seven action tokens, 2 .. 8: the first three and the last three.
        wanted = values[0, torch.tensor([2, 3, 4, 6, 7, 8])].tolist()
        assert [float(word) for word in lines[name][3:]] == pytest.approx(wanted, rel=1e-3)
    assert [float(word) for word in lines["scores"][3:]] == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert lines["replay_mask"] == ["[2]", "bool", "False"]


def test_trace_shows_what_a_penalty_leaves_of_whole_rewards() -> None:
    charged = [replace(item, reward=left) for item, left in zip(TWO, (0.75, 0.5), strict=True)]
    _, lines, _ = described("grpo", charged, penalised=True)
    assert (float(lines["scores"][-1]), float(lines["rewards"][-1])) == (1.0, 0.75)
    assert " ".join(lines["ref_log_probs"]).startswith("none whole rewards were charged for the distance to it")


def test_run_prints_the_data_flow_of_one_iteration_and_is_not_changed_by_it(tmp_path: Path) -> None:
    model, displays = save_qwen2(tmp_path / "model"), (SilentDisplay(), SilentDisplay())
    for trace, display in enumerate(displays):
        config = small_config(tmp_path / str(trace), model, run={"iterations": 2})
        train(config, trace=bool(trace), display=display)
    assert [sum("data flow" in note for note in display.notes) for display in displays] == [0, 1]
    assert any("after 2 optimizer steps" in note and "actor/grad_norm" in note for note in displays[1].notes)
    plain, traced = ([row["actor/fresh/pg_loss"] for row in display.iterations] for display in displays)
    assert plain == traced
