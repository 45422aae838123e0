"""Log-probs of 8,192 tokens over 151,936 words: out of hidden states in chunks, against whole logits.

Plain is what a user would write: logits, log_softmax, gather. Every pass, forward and backward, has a process of its
own, in alternating rounds, so that each has its own peak of memory. On a CPU times are CPU-seconds of one thread; with
entropies there are fewer tokens, for whole logits would need 25 GB. On a GPU (bfloat16) TRL's and Liger's by token are
measured too where they are installed (`pip install 'liger-kernel[cutedsl]>=0.8.5'`).
"""

import importlib.util
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from agentloop.algorithms.log_probs import entropies, log_softmax
from agentloop.models.token_log_probs.chunked import ChunkSizes, head_log_probs
from benchmarks._trained import ROOT, typed

VOCABULARY = 151_936
TOKENS, ENTROPY_TOKENS = 8192, 2048
_CPU_WIDTH, _GPU_WIDTH = 256, 4096
_PEERS = {"liger_tokens": "liger_kernel.ops.fused_linear_scaled_cross_entropy", "trl": "trl"}
_WITHOUT_ENTROPIES = ("trl",)
GOALS = {
    **{f"{what}{end}": goal for end in ("", "_entropy") for what, goal in (("memory", "<= 0.2"), ("time", "<= 1.5"))},
    **{f"time_of_{peer}": "<= 1" for peer in (*_PEERS, "liger_tokens_entropy")},
}


class Case:
    """Hidden states and weights of one size, on one device."""

    def __init__(self, tokens: int, *, entropy: bool) -> None:
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda" if on_gpu else "cpu")
        made = torch.Generator(device).manual_seed(0)
        settings: dict[str, Any] = {"dtype": torch.bfloat16 if on_gpu else torch.float32, "device": device}
        width = _GPU_WIDTH if on_gpu else _CPU_WIDTH
        self.hidden = torch.empty((tokens, width), **settings).normal_(generator=made).requires_grad_()
        self.weight = torch.empty((VOCABULARY, width), **settings).normal_(std=0.05, generator=made).requires_grad_()
        self.targets = torch.randint(0, VOCABULARY, (tokens,), generator=made, device=device)
        self.temperature = torch.ones(tokens, device=device)
        self.entropy = entropy

    def plain(self) -> Tensor:
        scores = log_softmax(self.hidden @ self.weight.t(), self.temperature)
        loss = scores.gather(1, self.targets[:, None]).sum()
        return loss + 0.01 * entropies(scores).sum() if self.entropy else loss

    def chunked(self) -> Tensor:
        log_probs, uncertainty = head_log_probs(
            self.hidden,
            self.weight,
            targets=self.targets,
            temperature=self.temperature,
            entropy=self.entropy,
            sizes=ChunkSizes.for_device(self.hidden.device),
        )
        return log_probs.sum() if uncertainty is None else log_probs.sum() + 0.01 * uncertainty.sum()

    def liger_tokens(self) -> Tensor:
        from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

        inputs = (self.hidden, self.weight, self.targets, 1.0, -100, 1, self.entropy)
        found = LigerFusedLinearScaledCrossEntropyFunction.apply(*inputs)
        loss: Tensor = 0.01 * found[1].sum() - found[0].sum() if self.entropy else -found.sum()
        return loss

    def trl(self) -> Tensor:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as size

        inputs = (self.hidden, self.weight, None, self.targets, 1.0, size, None, 1.0, ())
        loss: Tensor = ChunkedLogProbFunction.apply(*inputs)[0].sum()
        return loss


def one_pass(case: Case, way: Callable[[], Tensor]) -> None:
    case.hidden.grad = case.weight.grad = None
    torch.autograd.backward(way())


def measure(way: str, tokens: int, *, entropy: bool) -> dict[str, float]:
    """Seconds of a pass and bytes at its peak beyond inputs, weights and the weights' gradient; in this process."""
    torch.set_num_threads(1)
    case = Case(tokens, entropy=entropy)
    action: Callable[[], Tensor] = getattr(case, way)
    gradient = case.weight.nbytes
    if not torch.cuda.is_available():
        before = psutil.Process().memory_info().rss
        began = time.process_time()
        one_pass(case, action)
        seconds, peak = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"seconds": seconds, "bytes": peak - before - gradient}
    one_pass(case, action)  # compiles, and chooses kernels
    before = torch.cuda.memory_allocated() - gradient - case.hidden.nbytes
    torch.cuda.reset_peak_memory_stats()
    times = [_gpu_seconds(lambda: one_pass(case, action)) for _ in range(10)]
    peak = torch.cuda.max_memory_allocated() - before - gradient
    return {"seconds": statistics.median(times), "bytes": peak}


def _gpu_seconds(action: Callable[[], object]) -> float:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    action()
    ended.record()
    torch.cuda.synchronize()
    milliseconds: float = began.elapsed_time(ended)
    return milliseconds / 1e3


def in_process(way: str, tokens: int, *, entropy: bool) -> dict[str, float]:
    found: dict[str, float] = json.loads(typed("benchmarks.log_probs", way, tokens, int(entropy), folder=ROOT)[0])
    return found


def ways() -> list[str]:
    if not torch.cuda.is_available():
        return ["plain", "chunked"]
    return ["plain", "chunked", *(way for way, module in _PEERS.items() if _installed(module))]


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent
        return False


def compare(tokens: int, *, entropy: bool, rounds: int) -> dict[str, float]:
    """Medians over rounds, and medians of the ratios within one; against plain, in memory and time."""
    compared = [way for way in ways() if not (entropy and way in _WITHOUT_ENTROPIES)]
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in compared}
    for _ in range(rounds):
        for way in compared:
            runs[way].append(in_process(way, tokens, entropy=entropy))
    end = "_entropy" if entropy else ""

    def ratio(way: str, other: str, what: str) -> float:
        return statistics.median(a[what] / b[what] for a, b in zip(runs[way], runs[other], strict=True))

    found = {f"tokens{end}": float(tokens)}
    for way in compared:
        found[f"{way}{end}_s"] = statistics.median(run["seconds"] for run in runs[way])
        found[f"{way}{end}_gb"] = statistics.median(run["bytes"] for run in runs[way]) / 1e9
    found |= {f"memory{end}": ratio("chunked", "plain", "bytes"), f"time{end}": ratio("chunked", "plain", "seconds")}
    for peer in _PEERS:
        if peer in runs:
            found[f"time_of_{peer}{end}"] = ratio("chunked", peer, "seconds")
    return found


def main(rounds: int = 2) -> dict[str, float]:
    on_gpu = torch.cuda.is_available()
    where = torch.cuda.get_device_name() if on_gpu else "one CPU thread"
    print(f"log-probs over {VOCABULARY:,} words, forward and backward, {where}, {rounds} rounds")
    found = compare(TOKENS, entropy=False, rounds=rounds)
    found |= compare(TOKENS if on_gpu else ENTROPY_TOKENS, entropy=True, rounds=rounds)
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), entropy=sys.argv[3] == "1")))
