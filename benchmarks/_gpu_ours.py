"""agentloop's side of `gpu`: `agentloop train` of one work, with what it takes of time, tokens and memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from agentloop.runs.run_folder import open_run_folder
from agentloop.training.loop import Loop
from agentloop.training.train import train
from benchmarks._gpu_work import asked, summary
from replay.questions import metric_series

DRIFT = "actor/fresh/drift_max"


class Memory:
    """Bytes in use between the phases of an iteration; nothing is noted without a card."""

    def __init__(self) -> None:
        self.held: dict[str, list[int]] = defaultdict(list)
        """Of this process's tensors, by moment."""
        self.peak: dict[str, list[int]] = defaultdict(list)
        """The most since the moment before."""
        self.card: dict[str, list[int]] = defaultdict(list)
        """Of the card, by all processes."""
        self.tokens: list[dict[str, int]] = []
        """Of each iteration: how many were sampled, and how many are learned from."""

    def watch(self, phase: str) -> Callable[..., Any]:
        """What `Loop` does in `phase`; its `draw` is given what was collected."""
        plain: Callable[..., Any] = getattr(Loop, phase)

        def watched(loop: Loop, *arguments: Any) -> Any:
            if phase == "draw":
                records = [trajectory.record for trajectory in arguments[1].trajectories]
                sampled = sum(record.num_action_tokens for record in records)
                self.tokens.append({"sampled": sampled, "trained": sum(record.num_tokens for record in records)})
            self.look(f"before {phase}")
            found = plain(loop, *arguments)
            self.look(f"after {phase}")
            return found

        return watched

    def look(self, moment: str) -> None:
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self.card[moment].append(total - free)
            self.held[moment].append(torch.cuda.memory_allocated())
            self.peak[moment].append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()

    def table(self) -> dict[str, float]:
        """GB: of the first iteration, but for the update, which is the last one: then AdamW's means are there."""
        held, peak = self.held, self.peak
        if not held:
            return {}
        found = {
            "weights": held["before iterate"][0],
            "sampling, beyond them": peak["before draw"][0] - held["before iterate"][0],
            "optimizer, and what stays": held["after update"][0] - held["before update"][0],
            "update, beyond all these": peak["after update"][-1] - held["before update"][-1],
            "at its peak": max(map(max, peak.values())),
            "of the card, before sampling": self.card["before iterate"][-1],
            "of the card, before the update": self.card["before update"][-1],
        }
        return {f"memory_gb: {name}": value / 1e9 for name, value in found.items()}


def main() -> None:
    order = asked()
    memory = Memory()
    for phase in ("iterate", "draw", "update"):
        setattr(Loop, phase, memory.watch(phase))
    vllm: dict[str, Any] = {
        "rollout.engine": "vllm",
        "engine.serve": True,
        "engine.memory_share": order.vllm_share,
        "engine.concurrency": 128,
    }
    engines = {"local": {}, "vllm": vllm, "vllm-file": vllm | {"engine.transfer": "file"}}
    config = order.config(**engines[order.engine])
    result = train(config)
    with closing(result.buffer()) as store:
        run = open_run_folder(result.folder).run_id
        series = {name: dict(found) for name, found in metric_series(store, run, families=["time/", DRIFT]).items()}
    seconds = {name.removeprefix("time/"): found for name, found in series.items() if name != DRIFT}
    iterations = [
        {phase: found[number] for phase, found in seconds.items() if number in found} | tokens
        for number, tokens in enumerate(memory.tokens, 1)
    ]
    success = {"success_before": result.success_before, "success_after": result.success_after}
    order.answer(
        {
            **summary(iterations),
            **({"drift_max": max(series[DRIFT].values())} if DRIFT in series else {}),
            **(success if config.tasks.held_out else {}),
            **memory.table(),
        }
    )


if __name__ == "__main__":
    main()
