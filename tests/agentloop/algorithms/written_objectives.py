"""Every objective from its written formula, in plain Python: loss, and the gradient by hand, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from agentloop.algorithms.objective_input import ObjectiveInput

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """A ragged batch of one stream. Outside the mask there is anything: NaN, infinity, 95 nats off."""

    log_probs: Array
    anchors: Array
    advantages: Array
    mask: npt.NDArray[np.bool_]
    trajectory: npt.NDArray[np.int64]
    signal_share: float = 0.75
    behavior: Array | None = None

    def tokens(self) -> list[Token]:
        return [
            Token(int(i), int(t), float(self.log_probs[i, t]), float(self.anchors[i, t]), float(self.advantages[i, t]))
            for i, t in zip(*np.nonzero(self.mask), strict=True)
        ]

    def inputs(self, log_probs: torch.Tensor) -> ObjectiveInput:
        return ObjectiveInput(
            log_probs=log_probs,
            anchors=torch.tensor(self.anchors),
            behavior_log_probs=torch.tensor(self.anchors if self.behavior is None else self.behavior),
            advantages=torch.tensor(self.advantages),
            loss_mask=torch.tensor(self.mask),
            trajectory=torch.tensor(self.trajectory),
            num_trajectories=int(self.trajectory.max()) + 1,
            signal_share=torch.full((len(self.trajectory),), self.signal_share),
        )


@dataclass
class Token:
    row: int
    place: int
    l: float  # noqa: E741  log-prob
    anchor: float
    a: float
    loss: float = field(default=0.0)
    gradient: float = field(default=0.0)

    @property
    def d(self) -> float:
        return min(20.0, max(-20.0, self.l - self.anchor))

    @property
    def r(self) -> float:
        return math.exp(self.d)

    @property
    def inside(self) -> bool:
        """Beyond 20 nats a ratio has no gradient."""
        return -20 < self.l - self.anchor < 20


def random_rows(seed: int, *, equal_advantages: bool = False) -> Rows:
    """Forty rows of twenty trajectories; a third of the log-ratios up to 30 nats either way."""
    rng = np.random.default_rng(seed)
    shape = (40, 17)
    log_probs = rng.uniform(-8, -1e-3, shape)
    near, far = rng.normal(0, 0.4, shape), rng.uniform(-30, 30, shape)
    anchors = log_probs - np.where(rng.random(shape) < 0.33, far, near)
    mask = rng.random(shape) < 0.6
    mask[3] = False
    trajectory = np.sort(rng.integers(0, 20, 40))
    of_trajectory = rng.normal(0, 1, 20)
    of_trajectory[::5] = 0.0
    advantages = np.repeat(of_trajectory[trajectory][:, None], 17, axis=1)
    if not equal_advantages:
        advantages = advantages + rng.normal(0, 1, shape) * (rng.random(shape) < 0.5)
    for wild in (log_probs, anchors, advantages):
        wild[~mask] = rng.choice([np.nan, np.inf, -np.inf, 95.0], int((~mask).sum()))
    return Rows(log_probs, anchors, advantages, mask, trajectory)


def written(name: str, rows: Rows, options: dict[str, Any]) -> tuple[Array, Array]:
    """Loss per token, and the gradient of their sum."""
    tokens = rows.tokens()
    if name in _OF_TRAJECTORIES:
        members: dict[int, list[Token]] = {}
        for token in tokens:
            members.setdefault(int(rows.trajectory[token.row]), []).append(token)
        for group in members.values():
            _OF_TRAJECTORIES[name](group, **options)
    else:
        for token in tokens:
            extra = {"share": rows.signal_share} if name == "gpg" else {}
            token.loss, token.gradient = _OF_TOKENS[name](token, **options, **extra)
    loss, gradient = np.zeros_like(rows.log_probs), np.zeros_like(rows.log_probs)
    for token in tokens:
        loss[token.row, token.place], gradient[token.row, token.place] = token.loss, token.gradient
    return loss, gradient


def _clip(a: float, r: float, low: float, high: float, dual: float | None) -> tuple[float, bool]:
    """PPO by cases: the loss, and whether it moves with r."""
    if a >= 0:
        return -a * min(r, 1 + high), r < 1 + high
    ceiling = math.inf if dual is None else dual
    return -a * min(max(r, 1 - low), ceiling), 1 - low < r < ceiling


def _ppo_clip(t: Token, *, clip_low: float, clip_high: float, dual_clip: float | None) -> tuple[float, float]:
    loss, moves = _clip(t.a, t.r, clip_low, clip_high, dual_clip)
    return loss, -t.a * t.r * (moves and t.inside)


def _cispo(t: Token, *, ratio_low: float, ratio_high: float) -> tuple[float, float]:
    w = min(max(t.r, ratio_low), ratio_high)
    return -w * t.a * t.l, -w * t.a


def _dppo_tv(t: Token, *, divergence_low: float, divergence_high: float, ratio_high: float) -> tuple[float, float]:
    moved = math.exp(t.l) - math.exp(t.anchor)
    if (t.a > 0 and moved > divergence_high) or (t.a < 0 and moved < -divergence_low):
        return 0.0, 0.0
    w = min(t.r, ratio_high)
    return -w * t.a * t.l, -w * t.a


def _dppo_kl(t: Token, *, divergence_low: float, divergence_high: float, ratio_high: float) -> tuple[float, float]:
    """The two outcomes of a coin, this token or another one, summed one by one."""
    now, then = math.exp(t.l), math.exp(t.anchor)
    coin = ((then, now), (max(-math.expm1(t.anchor), 1e-8), max(-math.expm1(t.l), 1e-8)))
    far = math.fsum(q * math.log(q / p) for q, p in coin)
    left = (t.a > 0 and now > then and far > divergence_high) or (t.a < 0 and now < then and far > divergence_low)
    w = min(t.r, ratio_high)
    return (0.0, 0.0) if left else (-w * t.a * t.l, -w * t.a)


def _sapo(t: Token, *, tau_positive: float, tau_negative: float) -> tuple[float, float]:
    tau = tau_positive if t.a > 0 else tau_negative
    x = tau * (t.r - 1)
    value = 1 / (1 + math.exp(-x)) if x > -700 else 0.0
    slope = 1 / (2 + math.exp(x) + math.exp(-x)) if abs(x) < 700 else 0.0  # s (1 - s)
    return -t.a * 4 / tau * value, -t.a * 4 * slope * t.r * t.inside


def _exgrpo(t: Token, *, beta: float) -> tuple[float, float]:
    return -t.a * t.r / (t.r + beta), -t.a * beta * t.r / (t.r + beta) ** 2 * t.inside


def _luffy(t: Token, *, gamma: float) -> tuple[float, float]:
    p = math.exp(t.l)
    return -t.a * p / (p + gamma), -t.a * gamma * p / (p + gamma) ** 2


def _bc(t: Token, *, coef: float, weighting: str) -> tuple[float, float]:
    u = 1.0 if weighting == "uniform" else max(t.a, 0.0)
    return -coef * u * t.l, -coef * u


_OF_TOKENS: dict[str, Callable[..., tuple[float, float]]] = {
    "reinforce": lambda t: (-t.a * t.l, -t.a),
    "surrogate": lambda t: (-t.a * t.r, -t.a * t.r * t.inside),
    "gpg": lambda t, share: (-t.a * t.l / share, -t.a / share),
    "ppo_clip": _ppo_clip,
    "cispo": _cispo,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
    "sapo": _sapo,
    "exgrpo": _exgrpo,
    "luffy": _luffy,
    "bc": _bc,
}


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.fsum(found) / len(found)


def _gspo(tokens: list[Token], *, clip_low: float, clip_high: float) -> None:
    s = math.exp(_mean(t.d for t in tokens))
    for t in tokens:
        t.loss, moves = _clip(t.a, s, clip_low, clip_high, None)
        t.gradient = -t.a * s * (moves and t.inside)


def _gmpo(tokens: list[Token], *, log_ratio_low: float, log_ratio_high: float) -> None:
    def sign(t: Token) -> int:
        return (t.a > 0) - (t.a < 0)

    def chosen(t: Token) -> float:
        return sign(t) * min(sign(t) * t.d, sign(t) * min(max(t.d, -log_ratio_low), log_ratio_high))

    g = math.exp(_mean(chosen(t) for t in tokens))
    for t in tokens:
        t.loss = -t.a * g
        moves = t.inside and ((t.a > 0 and t.d < log_ratio_high) or (t.a < 0 and t.d > -log_ratio_low))
        t.gradient = -math.fsum(other.a for other in tokens) * g / len(tokens) * moves


def _topr(tokens: list[Token], *, ratio_high: float) -> None:
    total = math.fsum(t.d for t in tokens)
    tapered = ratio_high if total > math.log(ratio_high) else math.exp(total)
    for t in tokens:
        w = tapered if t.a < 0 else 1.0
        t.loss, t.gradient = -w * t.a * t.l, -w * t.a


_OF_TRAJECTORIES: dict[str, Callable[..., None]] = {"gspo": _gspo, "gmpo": _gmpo, "topr": _topr}
