from pathlib import Path
from typing import Any

import pytest

from agentloop.config.config_file import load_config
from agentloop.errors import UserError
from agentloop.learning.gradients import stream_losses
from tests.fakes.batch_rows import gradients, mixed_rows, run_config, scored_rows, tiny_actor


@pytest.mark.parametrize(
    ("overrides", "objective"),
    [
        (["objective=gspo"], {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}),
        (["objective.name=gspo"], {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}),
        (["objective.name=gspo", "objective.clip_low=0.5"], {"name": "gspo", "clip_low": 0.5, "clip_high": 4e-4}),
        (["objective.clip_low=0.5"], {"name": "ppo_clip", "clip_low": 0.5, "clip_high": 0.6, "dual_clip": None}),
        (["objective={name: ppo_clip}"], {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}),
    ],
)
def test_options_of_one_objective_do_not_follow_another_one(
    tmp_path: Path, overrides: list[str], objective: dict[str, Any]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("loss: {replay: {objective: {name: ppo_clip, clip_high: 0.6}}}")
    replay = load_config(path, [f"loss.replay.{override}" for override in overrides]).loss.replay
    assert replay.objective.model_dump() == objective


OWN = """
import torch
from agentloop.algorithms.objectives import PolicyLoss

def tempered(inputs, *, power=1.0):
    return -inputs.advantages * inputs.log_ratios.exp() ** power

def flagged(inputs):
    loss = -inputs.advantages * inputs.log_ratios.exp()
    return PolicyLoss(loss, torch.ones_like(inputs.loss_mask), torch.zeros_like(inputs.loss_mask))

def summed(inputs):
    return inputs.log_probs.sum()

def broken(inputs):
    raise KeyError("weights")

def wordy(inputs):
    return "none"
"""


def own(tmp_path: Path, name: str, **options: Any) -> dict[str, Any]:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return {"objective": {"name": f"{path}:{name}", "options": options}}


def test_objective_of_ones_own_is_trained_with_its_options(tmp_path: Path) -> None:
    actor, old = tiny_actor(seed=0), tiny_actor(seed=1)
    scored = scored_rows(actor, mixed_rows(), old=old)
    expected = gradients(actor, scored, run_config(loss={"replay": {"objective": "surrogate"}}))
    found = gradients(actor, scored, run_config(loss={"replay": own(tmp_path, "tempered")}))
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert float((found[1] - expected[1]).abs().max()) <= 1e-12 * float(expected[1].abs().max())
    halved = gradients(actor, scored, run_config(loss={"replay": own(tmp_path, "tempered", power=0.5)}))
    assert halved[0] != pytest.approx(expected[0], rel=1e-3)
    flagged = gradients(actor, scored, run_config(loss={"replay": own(tmp_path, "flagged")}))[2].metrics()
    # It says that every token is clipped: but the mask says which are tokens of it.
    assert flagged["actor/replay/pg_clipfrac"] == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("summed", r"loss.replay.objective \(summed\) must return a loss per token, .* got shape \[\]"),
        ("wordy", r"loss.replay.objective \(wordy\) must return a loss per token, .* got str"),
        ("broken", r"loss.replay.objective \(broken\) must take an ObjectiveInput .* got KeyError: 'weights'"),
    ],
)
def test_objective_of_ones_own_that_is_none_is_refused(tmp_path: Path, name: str, message: str) -> None:
    actor = tiny_actor()
    with pytest.raises(UserError, match=message):
        config = run_config(loss={"replay": own(tmp_path, name)})
        gradients(actor, scored_rows(actor, mixed_rows(), old=actor), config)


def test_objective_that_its_file_lacks_is_refused_before_training(tmp_path: Path) -> None:
    config = run_config(loss={"replay": own(tmp_path, "temperd")})
    with pytest.raises(UserError, match="loss.replay.objective must name a function of .* Did you mean tempered"):
        stream_losses(config.loss)
