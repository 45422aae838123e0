"""`agentloop replay whatif` on a trained run: its numbers are the trainer's own, and nothing is changed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from agentloop.analysis.stored_log_probs import named_weights
from agentloop.analysis.whatif.compared_rows import RowChoice
from agentloop.analysis.whatif.losses import asked_losses
from agentloop.analysis.whatif.measure import what_if
from agentloop.analysis.whatif.result import Effect, WhatIf
from agentloop.cli.main import app
from agentloop.config.sections.loss import PpoClip
from agentloop.errors import UserError
from agentloop.runs.run_folder import open_run_folder
from agentloop.training.train import train
from replay.store import ReplayStore
from tests.fakes.records import sql
from tests.fakes.runs import SilentDisplay, rows, small_config

pytestmark = pytest.mark.slow
Finished = tuple[Path, list[dict[str, float]]]
"""The folder of a run, and what each of its iterations logged."""
FRESH_REPLAY = ("fresh", "replay")
KL = 0.05
REJECTION = {"kind": "rejection", "ratio_low": 0.8, "ratio_high": 1.2}
LOSS = {
    "fresh": {"objective": {"name": "ppo_clip", "clip_high": 0.3}},
    "replay": {"objective": {"name": "ppo_clip", "clip_low": 0.15}},
}
"""Bounds of its own, which mean nothing to another objective."""


def settings(folder: Path, model: Path, **sections: dict[str, Any]) -> Any:
    """One optimizer step per iteration, large enough for replayed rows to clip."""
    own: dict[str, dict[str, Any]] = {
        "run": {"iterations": 3},
        "batch": {"mini_batch": 16, "micro_batch_tokens": 2000},
        "replay": {"fraction": 0.5},
        "optimizer": {"learning_rate": 1e-2},
        "loss": LOSS,
        "kl": {"loss_coef": KL},
        "evaluation": {"every": 0, "tasks": 2},
    }
    merged = {name: {**own.get(name, {}), **sections.get(name, {})} for name in {*own, *sections}}
    return small_config(folder, model, **merged)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> Finished:
    display = SilentDisplay()
    return train(settings(tmp_path_factory.mktemp("runs"), qwen2), display=display).folder, display.iterations


@pytest.fixture
def copied(finished: Finished, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished[0], tmp_path / "small-001"))


def asked(run: Path, *losses: str, policy: int | None = None, **rows_asked: Any) -> WhatIf:
    folder = open_run_folder(run)
    weights, asked = named_weights(folder, None if policy is None else str(policy)), RowChoice(**rows_asked)
    with closing(ReplayStore.open(run / "replay.sqlite", read_only=True)) as store:
        return what_if(store, folder, weights, losses=asked_losses(folder.config, losses), asked=asked)


def effect_of(found: WhatIf, objective: str, bucket: str = "all") -> Effect:
    (only,) = [e for e in found.effects if (e.objective, e.bucket) == (objective, bucket)]
    return only


def command(*words: object, name: str = "whatif") -> Result:
    return CliRunner().invoke(app, ["replay", name, *map(str, words)])


def files_of(folder: Path) -> dict[str, str]:
    """Every file by its hash, but those that SQLite makes for whoever reads."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".sqlite-shm", ".sqlite-wal")]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def of_stream(found: WhatIf, replayed: bool) -> list[tuple[Any, Any]]:
    """Data and effect of the buckets of one stream, in an iteration's batch."""
    return [
        (part, effect_of(found, "own", part.bucket))
        for part in found.data
        if part.bucket != "all" and (part.bucket != "fresh") == replayed
    ]


@pytest.mark.parametrize("iteration", [2, 3])
def test_batch_of_an_iteration_has_the_metrics_of_its_update(finished: Finished, iteration: int) -> None:
    run, metrics = finished[0], finished[1][iteration - 1]
    found = asked(run, "own", policy=iteration - 1, iteration=iteration)
    check_equal(found, metrics)
    trained = trained_tokens(found)
    # One denominator for both streams, and the KL beside them.
    policy_loss = sum(metrics[f"actor/{s}/pg_loss"] * trained[s] for s in FRESH_REPLAY) / sum(trained.values())
    assert effect_of(found, "own").loss == pytest.approx(policy_loss + KL * metrics["actor/kl_loss"], rel=1e-4)
    assert iteration != 3 or metrics["actor/replay/pg_clipfrac"] > 0.1


def trained_tokens(found: WhatIf) -> dict[str, int]:
    return {s: sum(effect.trained_tokens for _, effect in of_stream(found, s == "replay")) for s in FRESH_REPLAY}


def check_equal(found: WhatIf, metrics: Mapping[str, float]) -> None:
    """What the update of a whole batch logged is what one step on that batch is found to do."""
    whole = effect_of(found, "own")
    assert whole.gradient_norm == pytest.approx(metrics["actor/grad_norm"], rel=1e-4)
    trained = trained_tokens(found)
    assert sum(trained.values()) == whole.trained_tokens
    for stream in FRESH_REPLAY:
        parts = of_stream(found, stream == "replay")
        clipped = sum(effect.clipped * effect.trained_tokens for _, effect in parts) / trained[stream]
        assert clipped == pytest.approx(metrics[f"actor/{stream}/pg_clipfrac"])
        drift = sum(part.drift_mean * part.tokens for part, _ in parts) / sum(part.tokens for part, _ in parts)
        assert drift == pytest.approx(metrics[f"actor/{stream}/drift_mean"], rel=1e-4)
        assert sum(part.trajectories for part, _ in parts) == metrics[f"batch/{stream}"]
    assert found.data[0].ess == pytest.approx(metrics["actor/fresh/ess"], rel=1e-4)
    ess = {name: value for name, value in metrics.items() if name.startswith("actor/replay/ess/age_")}
    assert {f"actor/replay/ess/age_{part.bucket}": part.ess for part, _ in of_stream(found, True)} == pytest.approx(
        ess, rel=1e-4
    )


@pytest.mark.soak
@pytest.mark.parametrize(
    "sections",
    [
        {"lora": {"rank": 4}},
        {"batch": {"layout": "packed"}},
        {"loss": {"fresh": {}, "replay": {"objective": "gspo", "anchor": "behavior"}}},
        {"loss": {"normalise": "per_stream"}, "replay": {"weight": 0.5, "negative_weight": 0.25}},
        {"loss": {"replay": {"anchor": "old", "correction": REJECTION}}},
    ],
    ids=["lora", "packed", "gspo", "weighed", "rejection"],
)
def test_any_kind_of_update_is_found_again(tmp_path: Path, qwen2: Path, sections: dict[str, dict[str, Any]]) -> None:
    display = SilentDisplay()
    run = train(settings(tmp_path, qwen2, **sections), display=display).folder
    for iteration, metrics in enumerate(display.iterations[1:], start=2):
        check_equal(asked(run, "own", policy=iteration - 1, iteration=iteration), metrics)


def test_rows_are_in_the_bucket_of_their_staleness(finished: Finished) -> None:
    plain = "select policy_version_min, count(*) from trajectories where slot < 2 group by 1"
    stored = dict(rows(finished[0] / "replay.sqlite", plain))

    def counted(found: WhatIf) -> dict[str, int]:
        return {part.bucket: part.trajectories for part in found.data}

    # The policy is version 3: rows of versions 2, 1 and 0 are 1, 2 and 3 publishes old.
    found = asked(finished[0], "own", filter="slot < 2")
    assert counted(found) == {"1": stored[2], "2-3": stored[1] + stored[0], "all": sum(stored.values())}
    earlier = asked(finished[0], "own", policy=1, filter="slot < 2")
    assert counted(earlier) == {"0": stored[1], "1": stored[0], "all": stored[0] + stored[1]}
    assert {why: len(ids) for why, ids in earlier.left_out.items()} == {"sampled by a policy after 1": stored[2]}


def test_rows_over_the_limit_are_thinned_over_all_ages(finished: Finished) -> None:
    found = asked(finished[0], "own", limit=8)
    assert found.found == 32  # 16 in the first iteration, half of 16 in the two after it
    # Every fourth row in the order of (iteration, slot): 4 of the first 16, then 2 of each 8.
    assert [(part.bucket, part.trajectories) for part in found.data] == [("1", 2), ("2-3", 6), ("all", 8)]


def test_objective_that_must_clip_everything_clips_everything(finished: Finished, tmp_path: Path) -> None:
    (tmp_path / "tight.yaml").write_text(
        "loss: {replay: {objective: {name: cispo, ratio_low: 1000, ratio_high: 1001}}}\nkl: {loss_coef: 0}\n"
    )
    (tmp_path / "free.yaml").write_text("loss: {replay: {objective: surrogate}}\nkl: {loss_coef: 0}\n")
    names = [str(tmp_path / "tight.yaml"), str(tmp_path / "free.yaml")]
    found = asked(finished[0], *names, filter="advantage != 0", limit=12)
    for bucket in (part.bucket for part in found.data):
        tight, free = effect_of(found, "tight", bucket), effect_of(found, "free", bucket)
        assert (tight.clipped, free.clipped) == (1.0, 0.0)
        assert tight.clipped_above is not None and tight.clipped_below is not None
        assert tight.clipped_above + tight.clipped_below == pytest.approx(1.0)
        # The same log-probs for both, and cispo's weights are 1000 where they were about 1.
        assert (tight.ratio_p01, tight.ratio_p99) == (free.ratio_p01, free.ratio_p99)
        assert tight.gradient_norm > 500 * free.gradient_norm


def test_rows_that_are_corrupt_or_without_a_known_advantage_are_named(copied: Path) -> None:
    ((id,),) = rows(copied / "replay.sqlite", "select id from trajectories where iteration = 2 and slot = 0")
    sql(copied / "replay.sqlite", "delete from segments where trajectory = ?", id)
    found = asked(copied, "own", filter="slot == 0")
    assert found.left_out == {"corrupt: agentloop replay verify says why": (id,)}
    assert rows(copied / "replay.sqlite", "select count(*) from trajectories where state = 'quarantined'") == [(0,)]
    identity = json.loads((copied / "run.json").read_text())
    # Then an advantage depends on its batch: only an update knows it.
    identity["config"]["advantage"]["normalise_batch"] = "scale"
    (copied / "run.json").write_text(json.dumps(identity))
    ((id,),) = rows(copied / "replay.sqlite", "select trajectory from draws where iteration = 3 and slot = 0")
    sql(copied / "replay.sqlite", "update draws set advantage = null where trajectory = ?", id)
    sql(copied / "replay.sqlite", "update draws set advantage = 7.0 where iteration = 3 and slot = 1")
    ((other,),) = rows(copied / "replay.sqlite", "select trajectory from draws where iteration = 3 and slot = 1")
    found = asked(copied, "own", filter="iteration == 3")
    unknown = "no advantage is known: no update has used it"
    assert found.left_out == {unknown: (id,)}
    assert found.data[-1].trajectories == 7  # of 8
    assert found.advantages == "those of the last update that used the row"
    (copied / "good.yaml").write_text("loss: {replay: {objective: reinforce}}\nkl: {loss_coef: 0}\n")
    (copied / "bc.yaml").write_text("loss: {replay: {objective: bc}}\nkl: {loss_coef: 0}\n")
    alone = asked(copied, str(copied / "good.yaml"), str(copied / "bc.yaml"), filter=f"id == '{other}'")
    # One row's policy gradient is its cloning gradient, as many times as its advantage is.
    assert effect_of(alone, "good").gradient_norm == pytest.approx(7.0 * effect_of(alone, "bc").gradient_norm, rel=1e-4)
    with pytest.raises(UserError, match="rows to look at must be at least one, got none of .*1 left out"):
        asked(copied, "own", filter=f"id == '{id}'")


def test_run_of_a_gpu_is_asked_without_one(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = asked(copied, "own", limit=4).effects
    identity = json.loads((copied / "run.json").read_text())
    identity["config"]["compute"] |= {"log_probs": "triton", "compile": True}
    (copied / "run.json").write_text(json.dumps(identity))
    monkeypatch.delattr(torch, "compile")
    assert asked(copied, "own", limit=4).effects == before
    assert command(copied, "--limit", "1", name="rescore").exit_code == 0


def test_bounds_of_the_runs_own_objective_do_not_follow_another_one(
    finished: Finished,
) -> None:
    config = open_run_folder(finished[0]).config
    (gspo, ppo) = asked_losses(config, ["gspo", "ppo_clip"])
    assert gspo.config.loss.replay.objective.name == gspo.config.loss.fresh.objective.name == "gspo"
    assert isinstance(clip := ppo.config.loss.replay.objective, PpoClip)
    assert clip.clip_low == 0.2  # the default, not the run's 0.15
    assert gspo.config.kl == config.kl and gspo.config.batch == config.batch
    assert [loss.name for loss in asked_losses(config, [])] == ["own"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("loss: {replay: {objektive: gspo}}", "bad.yaml:1: loss.replay.objektive must be a known key, got an unknown "),
        ("\nbatch: {mini_batch: 16}", "bad.yaml:2: batch must be left out of a loss, got a key that is no part of one"),
        ("kl: {reference: copy}", "kl.reference must be left out of a loss"),
    ],
)
def test_file_that_is_no_loss_is_refused_in_one_line(finished: Finished, tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError) as raised:
        asked_losses(open_run_folder(finished[0]).config, [str(tmp_path / "bad.yaml")])
    assert told in str(raised.value) and "\n" not in str(raised.value)


def test_command_changes_nothing(copied: Path) -> None:
    before, state = files_of(copied), torch.get_rng_state()
    words = (copied, "--loss", "own", "--loss", "reinforce", "--limit", "6")
    plain, programs = command(*words), command(*words, "--json")
    assert (plain.exit_code, plain.exception) == (0, None)
    assert files_of(copied) == before
    assert torch.get_rng_state().equal(state)
    answer = json.loads(programs.stdout)
    # Two objectives in the buckets 1, 2-3 and all.
    assert [(e["bucket"], e["objective"]) for e in answer["effects"]] == [
        (bucket, name) for bucket in ("1", "2-3", "all") for name in ("own", "reinforce")
    ]
    (line,) = [line.split() for line in plain.output.splitlines() if line.split()[:2] == ["all", "reinforce"]]
    assert line[-1] == f"{answer['effects'][-1]['gradient_norm']:.4g}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--loss", "gpso"], "--loss must be a YAML file, own, or one of ppo_clip, reinforce, "),
        (["--loss", "gspo", "--loss", "gspo"], "--loss must name each objective once, got gspo twice"),
        (["--iteration", "9"], "iteration must be a committed one, from 1 to 3, got 9"),
        (["--policy", "77"], "--policy must be a version whose weights are still in"),
        (["--where", "rewrd > 1"], "reward"),
    ],
)
def test_question_that_has_no_answer_is_one_line(finished: Finished, words: list[str], message: str) -> None:
    result = command(finished[0], *words)
    assert message in (result.stderr if isinstance(result.exception, SystemExit) else str(result.exception))
    assert result.exit_code != 0
