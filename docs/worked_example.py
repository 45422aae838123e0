"""Writes docs/worked-example.md: `python -m docs.worked_example > docs/worked-example.md`.

What the policies say is written out here; everything else on the page is computed by the library's own
modules. The text is that of worked-example.md.jinja; its arithmetic is carried out and compared with what they found.
"""

import math
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jinja2
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from agentloop import Environment, RunConfig, Task
from agentloop.engines import Completion, GenerationRequest
from agentloop.environments.factory import load_environment
from agentloop.environments.run_environments import RunEnvironments
from agentloop.learning.batch import ScoredBatch, build_batch
from agentloop.learning.passes import accumulate_gradients, score_batch
from agentloop.learning.stream_losses import stream_losses
from agentloop.learning.update_stats import UpdateTotals, drift_of, row_stats
from agentloop.rollouts.actors import Actors
from agentloop.rollouts.collect import Collector
from agentloop.rollouts.rewards import RewardScorer
from agentloop.rollouts.trajectories import CollectedBy
from agentloop.training.advantage_estimator import AdvantageEstimator
from context import ChatTemplate, ReactParser, Renderer, TokenCodec, default_authors, loss_mask, response_mask
from replay import DrawRequest, IterationRecord, ReplayStore, RunRecord, Trajectory, make_sampler
from replay.mixing.batch_plan import Mixer

CONFIG = """\
algorithm: dr_grpo                        # advantage = reward - mean reward
environment: {task_pool: 1}
batch: {trajectories: 2, group_size: 1, mini_batch: 2}
replay: {fraction: 0.5, baseline: shared, sampler: uniform, successful_only: false}
"""
AUTHORS = default_authors()
WORDS = ["1", "2", "3", "+", "="]
CONTROL = ["<user>", "<assistant>", "<end>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SAMPLED = (("<assistant>", "3"), ("3", "<end>"), ("<assistant>", "2"), ("2", "<end>"))
"""(token before, token) of the batch's action tokens, in its order."""
POLICIES = {
    "version 0": (0.5, 0.8, 0.25, 0.8),
    "version 1": (0.4, 0.9, 0.5, 0.8),
    "one step later": (0.36, 0.9, 0.6, 0.8),
}
"""The probability of each of them."""


def make_codec() -> TokenCodec:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(CONTROL)
    return TokenCodec(tokenizer.to_str())


CODEC = make_codec()
ID = {word: i for i, word in enumerate([*WORDS, *CONTROL])}


class OnePlusOne(Environment):
    def make_task(self, rng):
        return Task("1+1=", {"answer": "2"})

    def reward(self, task, messages):
        return float(messages[-1].content == task.payload["answer"])


class WrittenPolicy:
    """An engine and an actor whose log-probs stand in a table, by the token and the one before it."""

    device, dtype, packs = torch.device("cpu"), torch.float64, False

    def __init__(self, name: str, *, answer: str = "") -> None:
        self.policy_version = int(name == "version 1")
        self._answer = answer
        self.table = torch.full((len(ID), len(ID)), torch.nan, dtype=torch.float64)
        for (before, token), probability in zip(SAMPLED, POLICIES[name], strict=True):
            self.table[ID[before], ID[token]] = math.log(probability)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        before, answer, end = ID["<assistant>"], ID[self._answer], ID["<end>"]
        log_probs = (float(self.table[before, answer]), float(self.table[answer, end]))
        return [Completion((answer, end), log_probs, self.policy_version, (0.0, 0.0)) for _ in requests]

    def log_probs(
        self, token_ids: Tensor, attention_mask: Tensor, response_mask: Tensor, temperature: Tensor, *, entropy=True
    ) -> tuple[Tensor, Tensor]:
        before, rows = token_ids.roll(1, dims=1), torch.zeros_like(token_ids, dtype=torch.float64)
        found = rows.masked_scatter(response_mask, self.table[before[response_mask], token_ids[response_mask]])
        return found, torch.zeros_like(found)


class KeptTotals(UpdateTotals):
    """Keeps the loss of every token, of which an update keeps sums alone."""

    def add(self, policy, inputs, **named):
        self.loss, self.inputs = policy, inputs
        super().add(policy, inputs, **named)


def collect(answer: str, iteration: int, config: RunConfig):
    """One episode whose reply is known, through environment, context, rewards and advantages."""
    factory = load_environment(f"{__file__}:OnePlusOne", {})
    renderer = Renderer(CODEC, ChatTemplate(TEMPLATE, {}), authors=AUTHORS, stop_ids=frozenset({ID["<end>"]}))
    policy = WrittenPolicy(f"version {iteration - 1}", answer=answer)
    environments = RunEnvironments({factory.name: factory})
    actors = Actors(environments, policy, renderer, ReactParser(), AUTHORS, len(ID), parsers=ReactParser)
    scorer = RewardScorer(config.reward)
    collector = Collector(actors, config, scorer, AdvantageEstimator(config).advantages_for_groups)
    return collector.collect([(factory.example, 1)], CollectedBy("worked", iteration, 0))


def follow(store: ReplayStore) -> dict[str, Any]:
    """Two iterations of a run, of which the second learns from both answers: what the page shows, by name."""
    config = RunConfig.model_validate(yaml.safe_load(CONFIG))
    store.add_run(RunRecord("worked", "worked", {}, AUTHORS.to_json(), AUTHORS.hash, code_version=""))
    earlier, fresh = collect("2", 1, config), collect("3", 2, config)
    for collected in (earlier, fresh):
        store.append(collected.tasks, collected.groups, collected.trajectories)

    request, sampler = DrawRequest("worked", 2, 1, limits=config.replay.limits), make_sampler("uniform", seed=0)
    plan = Mixer(config.mix_rule()).plan(iteration=2, available=store.available(request, sampler))
    request = replace(request, picks=plan.picks, first_slot=plan.fresh)
    own = request.fresh_rows(fresh.trajectories)
    store.reserve_fresh([row.draw for row in own])
    drawn = store.draw(request, sampler)
    rows, _ = AdvantageEstimator(config).advantages_for_batch([*own, *drawn], config.replay.baseline)

    batch = build_batch(rows, AUTHORS)
    scored = score_batch(batch, WrittenPolicy("version 1"), WrittenPolicy("version 0"), config, reuse=False)
    policy, totals = WrittenPolicy("one step later"), KeptTotals(batch.replayed)
    policy.table.requires_grad_()
    step = accumulate_gradients(policy, scored, config, losses=stream_losses(config.loss), totals=totals)

    stats = row_stats(drift_of(scored), totals, batch.trajectory_ids)
    records = [replace(row.draw, advantage=row.advantage, **stats[row.trajectory.id]) for row in rows]
    store.commit(IterationRecord("worked", 2, 1, 1, 1, 1, 1, 0.5, 1), records, sampler_state=sampler.state())
    right, wrong = store.read([*(row.id for row in earlier.trajectories), *(row.id for row in fresh.trajectories)])
    return {
        **of_tokens(right, wrong),
        **of_log_probs(scored, totals),
        "plan": plan,
        "draw": rows[1].draw,
        "batch": batch,
        "step_loss": step.loss,
        "gradient": [policy.table.grad[ID[before], ID[token]].item() for before, token in SAMPLED],
        "metrics": totals.metrics(),
        "draws": stored_draws(store),
    }


def of_tokens(right: Trajectory, wrong: Trajectory) -> dict[str, Any]:
    def answer(trajectory: Trajectory) -> dict[str, Any]:
        tokens = trajectory.segments[0].tokens
        return {
            "record": asdict(trajectory.record),
            "ids": tokens.token_ids.tolist(),
            "log_probs": tokens.behavior_log_probs.tolist(),
            "versions": tokens.policy_versions.tolist(),
        }

    tokens = right.segments[0].tokens
    return {
        "right": answer(right),
        "wrong": answer(wrong),
        "messages": right.messages,
        "words": [list(ID)[token] for token in tokens.token_ids],
        "authors": [AUTHORS.name(code) for code in tokens.authors.tolist()],
        "response": response_mask(tokens, AUTHORS).astype(int).tolist(),
        "trained": loss_mask(tokens, AUTHORS).astype(int).tolist(),
    }


def of_log_probs(scored: ScoredBatch, totals: KeptTotals) -> dict[str, Any]:
    """Lists with a number for each action token."""
    batch, mask = scored.batch, scored.batch.response_mask
    anchors, log_ratios = totals.inputs.anchors, totals.inputs.log_ratios.detach()
    arrays = {
        "behavior": batch.behavior_log_probs,
        "old": scored.old_log_probs,
        "anchor": anchors,
        "current": anchors + log_ratios,
        "ref": scored.ref_log_probs,
        "drift": drift_of(scored).token_logs.exp(),
        "advantage": batch.advantages,
        "ratio": log_ratios.exp(),
        "clipped": totals.loss.clipped,
        "loss": totals.loss.loss,
    }
    found = {name: array[mask].tolist() for name, array in arrays.items()}
    return found | {"ess": drift_of(scored).effective_sample_size(batch.replayed)}


def stored_draws(store: ReplayStore) -> list[dict[str, Any]]:
    query = (
        "select slot, stream, advantage, probability, staleness, drift_mean, token_gap_max, clip_fraction from draws "
        "order by slot"
    )
    with store.reading() as connection:
        return [dict(row) for row in connection.exec_driver_sql(query).mappings()]


def number(value: Any) -> str:
    return f"{round(value, 4) + 0.0:g}" if isinstance(value, float) else str(value)


def hand(arithmetic: str, found: float) -> str:
    """The arithmetic and its result, which must be what the modules found."""
    functions = {"log": math.log, "max": max}
    result = eval(arithmetic.replace("×", "*").replace("²", "**2"), functions)  # noqa: S307 (written in the template)
    if abs(result - found) > 2e-4:  # of rounded numbers
        raise ValueError(f"{arithmetic} must be {found}, which the modules found, got {result}.")
    return arithmetic if arithmetic == number(found) else f"{arithmetic} = {number(found)}"


def row(name: str, arithmetic: Sequence[str], found: Sequence[float]) -> str:
    return f"| {' | '.join([name, *map(hand, arithmetic, found)])} |"


def cells(array: Tensor) -> str:
    """Its last three numbers, or the only one."""
    return ", ".join(map(number, array[-3:].tolist())) if array.ndim else number(array.item())


def shape(array: Tensor) -> str:
    return f"{list(array.shape)} {str(array.dtype).removeprefix('torch.')}"


def page() -> str:
    with tempfile.TemporaryDirectory() as folder, closing(ReplayStore.create(Path(folder) / "replay.sqlite")) as at:
        found = follow(at)
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    environment.filters["number"] = number
    template = environment.from_string(Path(__file__).with_name("worked-example.md.jinja").read_text(encoding="utf-8"))
    written = list(zip(SAMPLED, zip(*POLICIES.values(), strict=True), strict=True))
    functions = {"hand": hand, "row": row, "cells": cells, "shape": shape}
    return template.render(config=CONFIG, written=written, **functions, **found)


if __name__ == "__main__":
    print(page(), end="")
