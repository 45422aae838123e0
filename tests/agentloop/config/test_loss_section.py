from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentloop.config import RunConfig
from agentloop.config.config_file import load_config
from agentloop.config.sections.loss import OBJECTIVE_NAMES, StreamLossSection
from agentloop.errors import UserError
from agentloop.learning.gradients import stream_losses
from tests.fakes.batch_rows import gradients, mixed_rows, run_config, scored_rows, tiny_actor

STATES_THAT_CAN_NOT_BE_WRITTEN = [
    (
        "fresh: {objective: ppo}",
        "run.yaml:1: loss.fresh.objective must be one of ppo_clip, reinforce, surrogate, gpg, gspo, cispo, sapo, gmpo, "
        "dppo_tv, dppo_kl, topr, exgrpo, luffy, bc, path/to/file.py:function, alone or with options, got 'ppo'.",
    ),
    ("fresh: {objective: {clip_high: 0.6}}", "loss.fresh.objective must be one of ppo_clip, "),
    (
        "\n  replay:\n    objective:\n      name: gspo\n      dual_clip: 3",
        "run.yaml:5: loss.replay.objective.dual_clip must be a known key, got an unknown one.",
    ),
    ("replay: {objective: {name: gspo, clip_low: 2}}", "loss.replay.objective.clip_low must be less than 1, got 2."),
    ("replay: {ppo_clip: {clip_high: 0.6}}", "loss.replay.ppo_clip must be a known key, got an unknown one."),
    ("fresh: {options: {x: 1}}", "loss.fresh.options must be a known key, got an unknown one."),
    ("fresh: {correction: {kind: truncate, ratio_low: 1}}", "loss.fresh.correction.ratio_low must be a known key"),
    ("fresh: {correction: {ratio_high: 2}}", "loss.fresh.correction must be one of none, truncate, mask, rejection, "),
    ("fresh: {missing_log_probs: {name: reject, coef: 2}}", "loss.fresh.missing_log_probs.coef must be a known key"),
    ("hinted: {objective: {name: bc, coef: 0}}", "loss.hinted.objective.coef must be greater than 0, got 0."),
    (
        "replay: {anchor: old, objective: exgrpo}",
        "loss.replay.anchor must be behavior when loss.replay.objective is exgrpo",
    ),
    (
        "replay: {correction: truncate}",
        "loss.replay.correction must be none when loss.replay.anchor is behavior, for drift would count twice",
    ),
    (
        "fresh: {correction: {kind: mask, ratio_low: 3}}",
        "loss.fresh.correction.ratio_low must be at most ratio_high (2), got 3.",
    ),
    ("hinted: {}", "loss.hinted must be null when context.strategy is linear, which shows no hint"),
]


@pytest.mark.parametrize(("text", "message"), STATES_THAT_CAN_NOT_BE_WRITTEN)
def test_loss_that_can_not_be_meant_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(f"loss: {{{text}}}" if not text.startswith("\n") else f"loss: {text}")
    with pytest.raises(UserError) as raised:
        load_config(tmp_path / "run.yaml")
    assert message in str(raised.value) and "\n" not in str(raised.value)


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


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"loss": {"norm_length": 7.0}},
            "loss.norm_length must be null when loss.aggregation is token-mean, got 7. Remove",
        ),
        ({"loss": {"aggregation": "seq-mean-token-sum-norm"}}, "loss.norm_length must be a number of tokens"),
        (
            {"kl": {"loss_gradient": "importance", "loss_estimator": "k2"}},
            "kl.loss_estimator must be k1 or k3 when kl.loss_gradient is importance, .*, got k2",
        ),
        ({"kl": {"reward_coef": 0.1, "horizon": 500}}, "kl.horizon must be left at 10000 when kl.target is null"),
        ({"reward": {"on_error": "drop"}}, r"reward.on_error must be left at stop when reward.functions is \[\]"),
        ({"reward": {"timeout_s": 5.0}}, r"reward.timeout_s must be left at 60.0 when reward.functions is \[\], got 5"),
        (
            {"tasks": {"curriculum_decay": 0.9}},
            "tasks.curriculum_decay must be left at 0.5 when tasks.curriculum is none, got 0.9",
        ),
    ],
)
def test_option_of_a_part_that_is_off_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        run_config(**sections)


def test_coefficient_can_be_swept_through_zero() -> None:
    for coef in (0.0, 0.1):
        run_config(kl={"reward_coef": coef, "reward_estimator": "k3"})
        run_config(kl={"loss_coef": coef, "loss_estimator": "k1", "loss_gradient": "importance"})


def test_v_trace_without_a_critic_is_not_taken_for_the_one_with_a_critic() -> None:
    stream = {"correction": {"kind": "v_trace", "ratio_high": 1.0}}
    run_config(loss={"fresh": stream})
    with pytest.raises(ValidationError, match="loss.fresh.correction.kind must not be v_trace when algorithm is ppo"):
        RunConfig.model_validate({"algorithm": "ppo", "loss": {"fresh": stream}})


@pytest.mark.parametrize(
    ("stream", "needed"),
    [
        ({"anchor": "behavior"}, True),
        ({"anchor": "old"}, False),
        ({"anchor": "behavior", "objective": "luffy"}, False),  # its behavior probability is 1
        ({"anchor": "behavior", "objective": "topr"}, True),
        ({"anchor": "old", "objective": "reinforce", "correction": {"kind": "mask", "ratio_high": 2.0}}, True),
    ],
)
def test_stream_knows_whether_a_behavior_log_prob_enters_a_ratio(stream: dict[str, Any], needed: bool) -> None:
    assert StreamLossSection.model_validate(stream).needs_behavior == needed


@pytest.mark.parametrize("way", [{"missing_log_probs": "recompute"}, {"objective": "bc"}, {"anchor": "old"}])
def test_rows_of_hints_may_be_replayed_where_their_log_probs_are_not_needed(way: dict[str, Any]) -> None:
    hinted: dict[str, Any] = {"context": {"strategy": "hint"}, "replay": {"fraction": 0.5}}
    with pytest.raises(ValidationError, match="or loss.replay.missing_log_probs"):
        RunConfig.model_validate(hinted)
    RunConfig.model_validate({**hinted, "loss": {"replay": way}})


def test_correction_of_rows_without_log_probs_is_refused_by_its_own_name() -> None:
    loss = {"fresh": {"correction": {"kind": "mask", "ratio_high": 2.0}}}
    with pytest.raises(ValidationError, match="loss.fresh.correction.kind must be none when context.strategy is hint"):
        RunConfig.model_validate({"context": {"strategy": "hint"}, "loss": loss})


OWN = """
import torch
from agentloop.algorithms.objectives import PolicyLoss

def tempered(inputs, *, power=1.0):
    return -inputs.advantages * inputs.log_ratios().exp() ** power

def flagged(inputs):
    loss = -inputs.advantages * inputs.log_ratios().exp()
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


@pytest.mark.parametrize("stream", ["fresh", "replay"])
@pytest.mark.parametrize("name", OBJECTIVE_NAMES)
def test_every_objective_can_be_configured_for_either_stream(name: str, stream: str) -> None:
    config = run_config(loss={stream: {"objective": name, "anchor": "behavior"}})
    assert stream_losses(config.loss)
