"""Experience replay with a trainer of your own: the whole loop in one file, on the library's types.

    python examples/minimal_loop.py [FILE]      # about half a minute; FILE is the new buffer

A tiny model that knows nothing learns to toss a coin with a tool, and to say how it fell. Engine, reward and optimizer
are written out, to be replaced by yours; buffer, exact tokens and the loss of both streams are the library's.
"""

import random
import sys
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from agentloop.algorithms.baselines.grpo import group_advantages
from agentloop.algorithms.heterogeneous import StreamLoss, anchor_log_probs, heterogeneous_loss
from agentloop.algorithms.objectives.ppo_clip import ppo_clip
from agentloop.learning.batch import build_batch
from agentloop.learning.update_stats import trajectory_drift
from agentloop.models.actor import Actor
from context import ChatTemplate, ContextManager, Message, Renderer, Reply, TokenCodec, ToolCall, default_authors
from replay import DrawRequest, Limits, Pick, ReplayStore, group_of, make_sampler
from replay.records import IterationRecord, RunRecord, TaskRecord, Trajectory, TrajectoryRecord

RUN, TASK, AUTHORS = "minimal", TaskRecord("coin", environment="coin", payload={}), default_authors()
FRESH, REPLAYED, EPOCHS = 32, 8, 2  # of each batch of 40 a fifth is replayed; it is gone through twice
SETTING = {"environment": "coin", "environment_version": "1"}  # stored with each row, and what its log-probs are of:
SETTING |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs_mode": "full"}
FRESH_LOSS = StreamLoss(partial(ppo_clip, clip_low=0.2, clip_high=0.28, dual_clip=3.0), anchor="old")
REPLAY_LOSS = StreamLoss(partial(ppo_clip, clip_low=0.2, clip_high=0.2, dual_clip=3.0), anchor="behavior")


def make_renderer() -> Renderer:
    """A tokenizer of seven words and a chat template, which a real model brings along."""
    words = ["coin", "toss", "H", "T", "heads", "tails"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="coin"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<end>"])
    codec = TokenCodec(tokenizer.to_str())
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}"
    return Renderer(codec, ChatTemplate(template, {}), authors=AUTHORS, stop_ids=frozenset({codec.token_id("<end>")}))


class CoinParser:
    """The reply `toss` calls the tool, any other is an answer. Real models are read by `context.choose_parser`'s."""

    def parse(self, text, *, stopped):
        calls = (ToolCall("toss", {}),) if stopped and text == "toss" else ()
        outcome = "tool_calls" if calls else "final" if stopped else "truncated"
        return Reply(outcome, Message("assistant", text, author="llm", tool_calls=calls), None)


@torch.no_grad()
def sample(model, prompt, limit, stop_ids):
    """Any engine will do that takes token ids, and gives token ids with the log-prob of each when it was sampled."""
    tokens, log_probs = [], []
    while len(tokens) < limit and not stop_ids.intersection(tokens):
        scores = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].log_softmax(dim=-1)
        tokens.append(int(torch.multinomial(scores.exp(), 1)))
        log_probs.append(float(scores[tokens[-1]]))
    return tokens, log_probs


def play(model, renderer, version):
    """One episode and what came of it. The context manager keeps the tokens themselves: none is encoded twice."""
    context, fell, tosses = ContextManager(renderer, CoinParser(), max_tokens=16), random.choice(["heads", "tails"]), 0
    context.begin([Message("user", "coin")], tools=())
    while True:
        tokens, log_probs = sample(model, context.prompt_ids, 3, renderer.stop_ids)
        reply = context.record_reply(tokens, log_probs, policy_version=version)
        if reply.outcome != "tool_calls" or tosses == 1:
            break
        context.observe([Message("tool", fell[0].upper(), author="env", name="toss")])
        tosses += 1
    success = tosses == 1 and reply.outcome == "final" and reply.message.content == fell
    earned = {"reward": 0.2 * tosses + 0.8 * success, "success": success}
    ended = "answered" if reply.outcome == "final" else reply.outcome
    return context, {**earned, "stop_reason": ended, "num_turns": 1 + tosses, "num_tool_calls": tosses}


def collect(model, renderer, iteration):
    """A group of episodes of one task, each with its advantage in the group: (reward - mean) / deviation (GRPO)."""
    episodes = [play(model, renderer, version=iteration - 1) for _ in range(FRESH)]
    advantages = group_advantages([outcome["reward"] for _, outcome in episodes], normalise_std=True)
    place = {"run": RUN, "group": f"{RUN}-{iteration}", "task": TASK.hash, "iteration": iteration}
    trajectories = []
    for member, (context, outcome) in enumerate(episodes):
        name = {"id": f"{RUN}-{iteration}-{member}", "slot": member, "member": member}
        record = TrajectoryRecord(**name, **place, **outcome, **SETTING, advantage=advantages[member])
        trajectories.append(Trajectory(record, context.segments(), context.messages))
    return trajectories


def update(actor, optimizer, rows):
    """Optimizer steps on fresh and replayed rows together; the effective sample size of the replayed ones."""
    batch, old = build_batch(rows, AUTHORS), None
    behavior, replayed, mask = batch.behavior_log_probs, batch.replay_mask, batch.response_mask
    kinds = [(~replayed, FRESH_LOSS), (replayed, REPLAY_LOSS)]
    for _ in range(EPOCHS):
        log_probs, _ = actor.log_probs(batch.token_ids, batch.attention_mask, mask, batch.temperature)
        old = log_probs.detach() if old is None else old
        # The ratio's denominator: for fresh rows the policy before its first step, for replayed ones whoever sampled.
        inputs = batch.objective_input(log_probs, anchor_log_probs(old, behavior, kinds))
        found = heterogeneous_loss(inputs, kinds)
        optimizer.zero_grad()
        (found.loss.sum() / batch.loss_mask.sum()).backward()
        optimizer.step()
    rows_of = {"response_mask": mask, "trajectory": batch.trajectory, "count": batch.num_trajectories}
    drift = trajectory_drift(old, behavior, **rows_of)  # exp(old - behavior): how far the policy had moved since
    return {"actor/replay/ess": drift.effective_sample_size(batch.replayed)} if replayed.any() else {}


def run(store, iterations=50):
    """Collect, append, draw, update, commit."""
    torch.manual_seed(0)
    random.seed(0)
    renderer, sampler = make_renderer(), make_sampler("success", seed=0)  # rare successes come back most
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=renderer.codec.vocab_size, initializer_range=0.1, **sizes))
    actor, optimizer = Actor(model), torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    store.add_run(RunRecord(RUN, RUN, {}, AUTHORS.to_json(), AUTHORS.hash, code_version="1"))
    limits, picks = Limits(successful_only=True), (Pick(REPLAYED),)
    for iteration in range(1, iterations + 1):
        trajectories = collect(model, renderer, iteration)
        group = group_of(trajectories)
        store.append([TASK], [group], trajectories)
        # A draw takes rows of earlier iterations and reserves them; the commit says which rows fed this update.
        request = DrawRequest(RUN, iteration, iteration - 1, picks, first_slot=FRESH, limits=limits)
        fresh = request.fresh_rows(store.read([trajectory.id for trajectory in trajectories]))
        store.reserve_fresh([row.draw for row in fresh])
        replayed = store.draw(request, sampler)
        metrics = {"rollout/success": group.success_rate} | update(actor, optimizer, fresh + replayed)
        counts = {"planned_fresh": FRESH, "planned_replay": REPLAYED, "fresh": FRESH, "replay": len(replayed)}
        done = {"fraction": REPLAYED / (FRESH + REPLAYED), "optimizer_steps": EPOCHS, "metrics": metrics}
        record = IterationRecord(RUN, iteration, policy_version=iteration - 1, **counts, **done)
        store.commit(record, [row.draw for row in fresh + replayed], sampler_state=sampler.state())
        print(f"{iteration:3} ", *(f"{name} {value:.3f} " for name, value in metrics.items()), flush=True)
    store.roles.end_run(RUN)  # its pages say that it is finished
    return model


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(mkdtemp()) / "replay.sqlite"
    run(ReplayStore.create(path))
    print(f"look inside: agentloop replay stats {path}")
