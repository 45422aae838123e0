import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentloop.config.sections.optimization import BatchSection
from agentloop.errors import TrainingStopped, UserError
from agentloop.learning.optimizer import shrunk_factor
from agentloop.learning.trainer import Trainer
from agentloop.models.actor import Actor
from replay.records import BatchRow
from replay.storage.staleness import ESS_BY_AGE
from tests.fakes.batch_rows import batch_row, ragged, row, segment, stored_off_by, with_log_probs
from tests.fakes.tiny_actors import run_config, sampled_by, tiny_actor, trainer, weights_of

CONFIG: dict[str, Any] = {"batch": {"mini_batch": 4}, "run": {"iterations": 10}}


def silent_rows() -> list[BatchRow]:
    return [row(f"t{i}", segment("uulll", seed=i), advantage=0.0, group=f"g{i}") for i in range(8)]


def test_update_without_a_signal_touches_neither_weights_nor_optimizer() -> None:
    actor = tiny_actor()
    learner = trainer(actor, run_config(**CONFIG, optimizer={"weight_decay": 0.1}))
    learner.update(ragged(), iteration=1)
    weights, state = weights_of(actor), {k: v.clone() for k, v in learner.state().items()}
    result = learner.update(silent_rows(), iteration=2)

    assert result.optimizer_steps == 2
    assert result.metrics["actor/skipped_no_signal"] == 2
    assert "actor/grad_norm" not in result.metrics
    assert result.metrics["actor/fresh/pg_loss"] == 0.0
    assert torch.equal(weights_of(actor), weights)
    after = learner.state()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[k], state[k]) for k in state)
    stats = result.rows["t0"]
    assert (stats["approx_kl"], stats["clip_fraction"]) == (None, 0.0)


@pytest.mark.parametrize(
    "term", [{"kl": {"loss_coef": 0.1}}, {"loss": {"entropy_coef": 0.1}}, {"loss": {"fresh": {"objective": "bc"}}}]
)
def test_regularised_or_cloning_update_moves_without_advantages(term: dict[str, Any]) -> None:
    actor = tiny_actor()
    before = weights_of(actor)
    learner = trainer(actor, run_config(**CONFIG, **term), reference=tiny_actor(seed=1))
    result = learner.update(silent_rows(), iteration=1)
    assert result.metrics["actor/skipped_no_signal"] == 0
    assert not torch.equal(weights_of(actor), before)
    assert (result.metrics.get("actor/kl_loss", 0.0) > 0) == ("kl" in term)


@pytest.mark.parametrize("mode", ["luffy", "bc", "recompute"])
def test_unknown_behavior_log_probs_are_trained_as_configured_and_counted(mode: str) -> None:
    """Ratio 1 to the old log-probs; p / (p + gamma) or cross-entropy, both by hand."""
    actor = tiny_actor()
    rows = [row("edited", segment("uxxul", seed=4), stream="replay", advantage=2.0)]
    config = run_config(batch={"mini_batch": 8}, loss={"replay": {"missing_log_probs": mode}})
    (drawn,) = sampled_by(actor, rows)
    known = drawn.trajectory.segments[0].tokens.behavior_log_probs.astype(float)
    # Of the two demonstrated tokens nobody knows it; the one that a policy sampled keeps it.
    mixed = [with_log_probs(drawn, [[math.nan, math.nan, math.nan, math.nan, known[4]]])]
    metrics = trainer(actor, config).update(mixed, iteration=1).metrics
    assert metrics["actor/replay/missing_log_probs"] == pytest.approx(2 / 3)
    p = [math.exp(value) for value in known[1:3]]
    tokens = {
        "recompute": [-2.0, -2.0],
        "luffy": [-2.0 * q / (q + 0.1) for q in p],
        "bc": [-math.log(q) for q in p],  # whatever the advantage
    }[mode]
    assert metrics["actor/replay/pg_loss"] == pytest.approx((sum(tokens) - 2.0) / 3, rel=1e-5)
    assert metrics["actor/replay/ratio_max"] == pytest.approx(1.0, abs=1e-6)


def drifted(actor: Any, drifts: list[list[float]]) -> list[BatchRow]:
    """Replayed rows of advantage 1 whose tokens have these ratios old / behavior."""
    rows = []
    for i, ratios in enumerate(drifts):
        (known,) = sampled_by(actor, [row(f"r{i}", segment("u" + "l" * len(ratios), seed=i), stream="replay")])
        log_probs = known.trajectory.segments[0].tokens.behavior_log_probs.astype(float)
        rows.append(with_log_probs(known, [[math.nan, *(log_probs[1:] - np.log(ratios))]]))
    return rows


@pytest.mark.parametrize(
    ("correction", "pg_loss", "metrics"),
    [
        # Ratio current / old is 1 and A = 1, so a token's loss is minus its weight: 2 + 1 + 4 + 0.5 over 4.
        ({"kind": "truncate", "ratio_high": 9.0}, -7.5 / 4, {"weight_mean": 7.5 / 4, "weight_zero": 0.0}),
        ({"kind": "truncate", "ratio_high": 2.0}, -5.5 / 4, {"weight_mean": 5.5 / 4, "weight_zero": 0.0}),
        ({"kind": "mask", "ratio_low": 0.8, "ratio_high": 3.0}, -3 / 4, {"weight_mean": 3 / 4, "weight_zero": 0.5}),
        # Two are left, and the denominator is 2.
        ({"kind": "rejection", "ratio_low": 0.8, "ratio_high": 3.0}, -1.0, {"rejected": 0.5}),
    ],
)
def test_corrections_weigh_and_reject(correction: dict[str, Any], pg_loss: float, metrics: dict[str, float]) -> None:
    actor = tiny_actor()
    rows = drifted(actor, [[2.0, 1.0], [4.0, 0.5]])
    stream = {"anchor": "old", "correction": correction}
    found = trainer(actor, run_config(batch={"mini_batch": 8}, loss={"replay": stream})).update(rows, iteration=1)
    assert found.metrics["actor/replay/pg_loss"] == pytest.approx(pg_loss, rel=1e-5)
    for name, value in metrics.items():
        key = name if name == "rejected" else f"importance_{name}"
        assert found.metrics[f"actor/replay/{key}"] == pytest.approx(value, rel=1e-5)
    # The drift is what people are shown, whatever is done about it: 7.5 / 4. The largest gap is log 4.
    assert found.metrics["actor/replay/token_gap_max"] == pytest.approx(math.log(4.0), rel=1e-5)
    assert found.metrics["actor/replay/drift_mean"] == pytest.approx(7.5 / 4, rel=1e-5)


def test_metrics_of_a_stream_without_rows_are_absent() -> None:
    fresh = trainer(tiny_actor(), run_config(**CONFIG)).update(ragged(replayed=0), iteration=1).metrics
    replay = trainer(tiny_actor(), run_config(**CONFIG)).update(ragged(fresh=0), iteration=1).metrics
    names = {"pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "approx_kl", "ratio_mean", "ratio_min", "ratio_max"}
    quantiles = {f"{name}_p{percent}" for name in ("ratio", "drift") for percent in ("01", "50", "99")}
    names |= {"drift_mean", "token_gap_max", "ess", *quantiles}
    shared = {"actor/grad_norm", "actor/learning_rate", "actor/skipped_no_signal"}
    assert set(fresh) == {f"actor/fresh/{name}" for name in names} | shared | {"actor/entropy"}
    assert set(replay) == {f"actor/replay/{name}" for name in {*names, "ess/age_unknown"}} | shared


def test_pg_loss_is_the_mean_over_the_steps_that_had_the_stream() -> None:
    """Two steps, one replayed row: at ratio 1 its loss is -A, whatever the other step holds."""
    actor = tiny_actor()
    rows = [row(f"f{i}", segment("uull", seed=i), advantage=2.0, group=f"g{i}") for i in range(3)]
    rows += sampled_by(actor, [row("r", segment("ulll", seed=9), advantage=0.5, stream="replay")])
    config = run_config(batch={"mini_batch": 2}, optimizer={"learning_rate": 1e-12})
    result = trainer(actor, config).update(rows, iteration=1)
    assert result.optimizer_steps == 2
    assert result.metrics["actor/fresh/pg_loss"] == pytest.approx(-2.0, abs=1e-6)
    assert result.metrics["actor/replay/pg_loss"] == pytest.approx(-0.5, abs=1e-6)


def test_quantiles_are_those_of_the_streams_own_tokens() -> None:
    """Five known drifts and a stream beside them that must not matter."""
    actor = tiny_actor()
    rows = [*drifted(actor, [[3.0, 1.0, 5.0, 2.0, 4.0]]), *ragged(replayed=0)]
    metrics = trainer(actor, run_config(batch={"mini_batch": 100})).update(rows, iteration=1).metrics
    # Ranks ceil(0.01 x 5) = 1, ceil(0.5 x 5) = 3 and ceil(0.99 x 5) = 5 of 1, 2, 3, 4, 5; the anchor is behavior,
    # and the first step's ratios are the drift.
    for name in ("drift", "ratio"):
        found = [metrics[f"actor/replay/{name}_p{percent}"] for percent in ("01", "50", "99")]
        assert found == pytest.approx([1.0, 3.0, 5.0], rel=1e-5)


def test_update_clears_gradients_left_by_others() -> None:
    actor, other = tiny_actor(), tiny_actor()
    for parameter in actor.model.parameters():
        parameter.grad = torch.full_like(parameter, 9.0)
    for policy in (actor, other):
        trainer(policy, run_config(**CONFIG)).update(ragged(), iteration=1)
    assert torch.equal(weights_of(actor), weights_of(other))


def test_objective_of_ones_own_without_a_gradient_is_refused_unless_it_is_zero(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "def detached(inputs):\n    return -inputs.log_probs.detach() * inputs.advantages\n\n\n"
        "def nothing(inputs):\n    return inputs.advantages * 0.0\n"
    )

    def learner(actor: Actor, name: str) -> Trainer:
        return trainer(actor, run_config(**CONFIG, loss={"fresh": {"objective": f"{file}:{name}"}}))

    rows = [row(f"t{i}", segment("uulll", seed=i)) for i in range(4)]
    with pytest.raises(UserError, match=r"loss.fresh.objective \(detached\) must return a loss with a gradient, got"):
        learner(tiny_actor(), "detached").update(rows, iteration=1)
    actor = tiny_actor()
    before = weights_of(actor)
    metrics = learner(actor, "nothing").update(rows, iteration=1).metrics
    assert metrics["actor/skipped_no_signal"] == 1
    assert torch.equal(weights_of(actor), before)


class CountingActor(Actor):
    """Notes how many rows each pass has."""

    sizes: list[int]

    def log_probs(self, token_ids: Any, *arguments: Any, **named: Any) -> Any:
        self.sizes.append(len(token_ids))
        return super().log_probs(token_ids, *arguments, **named)


def counting() -> CountingActor:
    actor = CountingActor(tiny_actor().model)
    actor.sizes = []
    return actor


def test_stored_log_probs_of_the_present_weights_need_no_pass_and_change_nothing() -> None:
    settings = run_config(batch={"mini_batch": 16, "micro_batch_tokens": 10_000})
    rows = sampled_by(tiny_actor(), ragged())
    marked = [replace(r, scored=r.stream == "fresh") for r in rows]
    scored, stored = counting(), counting()
    asked = trainer(scored, settings).update(rows, iteration=1).metrics
    saved = trainer(stored, settings).update(marked, iteration=1).metrics
    # Three replayed trajectories, the second with two segments: the six fresh ones, nine rows, are left out.
    assert (scored.sizes[0], stored.sizes[0]) == (13, 4)
    assert abs(saved.pop("actor/sampling_gap")) < 1e-6
    for name in ("actor/fresh/pg_loss", "actor/replay/pg_loss", "actor/grad_norm", "actor/fresh/drift_mean"):
        assert saved[name] == pytest.approx(asked[name], abs=1e-6)
    torch.testing.assert_close(weights_of(stored), weights_of(scored), atol=1e-5, rtol=0)


@pytest.mark.parametrize("algorithm", ["reinforce", "ppo"])
def test_stored_log_probs_that_are_off_are_recomputed_in_that_iteration(algorithm: str) -> None:
    settings = run_config(algorithm=algorithm, batch={"mini_batch": 4, "ppo_epochs": 2})
    rows = [stored_off_by(r, -0.01) if r.stream == "fresh" else r for r in sampled_by(tiny_actor(), ragged())]
    recomputed, trusted = tiny_actor(), tiny_actor()
    expected = trainer(recomputed, settings).update(rows, iteration=1)
    marked = [replace(r, scored=r.stream == "fresh") for r in rows]
    found = trainer(trusted, settings).update(marked, iteration=1)
    metrics = dict(found.metrics)
    assert metrics.pop("actor/sampling_gap") == pytest.approx(0.01, rel=0.01)
    assert metrics.pop("actor/old_log_probs_recomputed") == 1.0
    assert metrics == expected.metrics and found.rows == expected.rows
    assert torch.equal(weights_of(trusted), weights_of(recomputed))


def test_stored_log_probs_within_the_bound_are_old_ones() -> None:
    rows = [replace(stored_off_by(r, -0.0005), scored=True) for r in sampled_by(tiny_actor(), ragged(replayed=0))]
    metrics = trainer(tiny_actor(), run_config(**CONFIG)).update(rows, iteration=1).metrics
    assert metrics["actor/sampling_gap"] == pytest.approx(0.0005, rel=0.01)
    assert metrics["actor/old_log_probs_recomputed"] == 0.0
    assert metrics["actor/fresh/drift_mean"] == 1.0


def test_nan_never_reaches_the_weights_and_stops_the_run() -> None:
    actor = tiny_actor()
    learner = trainer(actor, run_config(**CONFIG))
    with torch.no_grad():
        actor.model.model.norm.weight[0] = math.nan
    before = weights_of(actor)
    with pytest.raises(TrainingStopped, match="must be finite, got loss nan .* step 1 of iteration 7"):
        learner.update(ragged(), iteration=7)
    assert torch.equal(weights_of(actor).nan_to_num(), before.nan_to_num())
    assert learner.state() == {}
    assert all(p.grad is None for p in actor.model.parameters())


CORRECTED = {"anchor": "old", "correction": {"kind": "mask", "ratio_high": 2.0}}
CHARGED = {"loss_coef": 0.1, "loss_gradient": "importance"}
TOP_P = {"top_p": 0.9}


@pytest.mark.parametrize(
    ("authors", "sampled", "replay", "kl", "refused"),
    [
        ("uxxul", {}, {}, {}, "trajectory drawn must be known .* got 2 unknown. Set loss.replay.missing_log_probs"),
        ("uxxul", {}, CORRECTED, {}, "when loss.replay.correction.kind is mask, got 2 unknown. Set loss.replay."),
        ("uxxul", {}, {"anchor": "old"}, {}, None),
        ("uull", TOP_P, {}, {}, "trajectory drawn must be sampled from the whole dis"),
        ("uull", {"top_k": 50}, CORRECTED, {}, "trajectory drawn must be sampled from the whole dis"),
        ("uull", TOP_P, {"objective": "luffy"}, CHARGED, "trajectory drawn must be sampled from the whole dis"),
        ("uull", TOP_P, {"anchor": "old"}, CHARGED, None),
        ("uull", TOP_P, {"objective": "luffy"}, {}, None),
        ("uxx", {**TOP_P, "mean_behavior_log_prob": math.nan}, {"missing_log_probs": "recompute"}, {}, None),
    ],
)
def test_log_probs_that_are_no_denominator_are_refused_before_any_update(
    authors: str, sampled: dict[str, Any], replay: dict[str, Any], kl: dict[str, Any], refused: str | None
) -> None:
    """Unknown ones, and those of a truncated distribution."""
    drawn = row("drawn", segment(authors), stream="replay").trajectory
    rows = [batch_row(replace(drawn, record=replace(drawn.record, **sampled)), "replay", advantage=1.0)]
    actor = tiny_actor()
    before = weights_of(actor)
    learner = trainer(actor, run_config(**CONFIG, loss={"replay": replay}, kl=kl), reference=tiny_actor(seed=1))
    if refused is None:
        learner.update(rows, iteration=1)
    else:
        with pytest.raises(UserError, match=refused):
            learner.update(rows, iteration=1)
    assert torch.equal(weights_of(actor), before) == (refused is not None)


def test_replay_stream_has_an_ess_for_each_age() -> None:
    """Old rows that are all wrong must not hide behind young ones that are right."""
    actor = tiny_actor()
    young = sampled_by(actor, [row(f"y{i}", segment("ull", seed=i), stream="replay") for i in range(3)])
    old = [row(f"o{i}", segment("ull", [level, level]), stream="replay") for i, level in enumerate((-1.0, -9.0))]
    aged = zip([*young, *old], (1, 2, 3, 5, 5), strict=True)
    rows = [batch_row(item.trajectory, "replay", staleness=age, advantage=1.0) for item, age in aged]
    metrics = trainer(actor, run_config(**CONFIG)).score_only(rows).metrics
    ess = {name.removeprefix(ESS_BY_AGE): value for name, value in metrics.items() if name.startswith(ESS_BY_AGE)}
    assert ess.keys() == {"1", "2-3", "4-7"}
    assert (ess["1"], ess["2-3"]) == pytest.approx((1.0, 1.0), abs=1e-4)
    # Each token of one of the two weighs exp(8) times a token of the other; of its two one may be all that counts.
    assert 0.25 <= ess["4-7"] < 0.51


def moved(rows: list[BatchRow], **sections: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """By how much one step of plain SGD moves the weights, and its metrics."""
    actor = tiny_actor()
    before = weights_of(actor)
    sgd = {"name": "sgd", "momentum": 0.0, "learning_rate": 1.0, **sections.pop("optimizer", {})}
    metrics = trainer(actor, run_config(optimizer=sgd, **sections)).update(rows, iteration=1).metrics
    return weights_of(actor) - before, metrics


@pytest.mark.parametrize(
    ("rows", "trajectories", "mini_batch", "factor"),
    [(64, 128, 128, 0.5), (128, 128, 128, 1.0), (32, 48, 12, 32 / 3 / 12), (24, 48, 12, 1.0), (40, 32, 32, 1.0)],
)
def test_rate_of_a_smaller_batch_is_its_rows_per_step_of_a_whole_one(
    rows: int, trajectories: int, mini_batch: int, factor: float
) -> None:
    batch = BatchSection(trajectories=trajectories, group_size=8, mini_batch=mini_batch)
    assert shrunk_factor(rows, batch) == pytest.approx(factor)


def test_a_batch_that_shrank_moves_the_weights_by_as_much_less() -> None:
    rows = sampled_by(tiny_actor(), [row("a", segment("ull", seed=5)), row("b", segment("ull", seed=6))])
    given = {"algorithm": "ppo", "batch": {"trajectories": 8, "mini_batch": 8}}
    (whole, off), (less, on) = (moved(rows, **given, replay={"shortfall": how}) for how in ("fresh", "shrink"))
    assert (off["actor/learning_rate"], on["actor/learning_rate"]) == (1.0, 0.25)
    assert on["critic/learning_rate"] == 0.25 * off["critic/learning_rate"] > 0
    torch.testing.assert_close(less, 0.25 * whole, rtol=1e-4, atol=1e-6)
