"""agentloop's side of `gpu`: `agentloop train` of one work, with what it takes of time, tokens and memory."""

from collections.abc import Callable
from typing import Any

import torch

from agentloop.training.loop import Loop
from agentloop.training.train import train
from benchmarks._gpu_work import asked, summary
from replay.questions import metric_series

GAP = "actor/fresh/token_gap_max"


def watched(peak: dict[str, float], tokens: list[dict[str, int]], phase: str) -> Callable[..., Any]:
    """What `Loop` does in `phase`: notes the most GB of tensors since the phase before, and each batch's tokens."""
    plain: Callable[..., Any] = getattr(Loop, phase)

    def run(loop: Loop, *arguments: Any) -> Any:
        if phase == "draw":
            records = [trajectory.record for trajectory in arguments[1].trajectories]
            sampled = sum(record.num_action_tokens for record in records)
            tokens.append({"sampled": sampled, "trained": sum(record.num_tokens for record in records)})
        if torch.cuda.is_available():
            if phase == "draw":
                peak["memory_gb: sampling"] = torch.cuda.max_memory_allocated() / 1e9
            torch.cuda.reset_peak_memory_stats()
        found = plain(loop, *arguments)
        if torch.cuda.is_available() and phase == "update":
            peak["memory_gb: update"] = torch.cuda.max_memory_allocated() / 1e9
        return found

    return run


def main() -> None:
    order = asked()
    peak: dict[str, float] = {}
    tokens: list[dict[str, int]] = []
    for phase in ("iterate", "draw", "update"):
        setattr(Loop, phase, watched(peak, tokens, phase))
    vllm: dict[str, Any] = {
        "rollout.engine": "vllm",
        "engine.serve": True,
        "engine.memory_share": order.vllm_share,
        "engine.concurrency": 128,
    }
    engines = {"local": {}, "vllm": vllm, "vllm-file": vllm | {"engine.transfer": "file"}}
    config = order.config(**engines[order.engine])
    result = train(config)
    with result.buffer as buffer:
        found = buffer.ask(metric_series, families=["time/", GAP])
    series = {name: dict(points) for name, points in found.items()}
    seconds = {name.removeprefix("time/"): found for name, found in series.items() if name != GAP}
    iterations = [
        {phase: found[number] for phase, found in seconds.items() if number in found} | counts
        for number, counts in enumerate(tokens, 1)
    ]
    success = {"success_before": result.success_before, "success_after": result.success_after}
    order.answer(
        {
            **summary(iterations),
            **({"token_gap_max": max(series[GAP].values())} if GAP in series else {}),
            **(success if config.tasks.held_out else {}),
            **peak,
        }
    )


if __name__ == "__main__":
    main()
