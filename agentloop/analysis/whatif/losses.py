"""The objectives that `replay whatif` is asked about: files of loss keys and names, each over a run's own loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentloop.analysis.whatif.result import AskedObjective
from agentloop.config import RunConfig
from agentloop.config.config_file import is_config_file, load_over, read_keys, to_plain
from agentloop.config.sections.loss import OBJECTIVE_NAMES, NoCorrection, StreamLossSection
from agentloop.config.strict_yaml import shown
from agentloop.errors import UserError

OWN = "own"
"""Names the run's own loss."""
_KEYS = (
    ("loss",),
    ("kl", "loss_coef"),
    ("kl", "loss_estimator"),
    ("kl", "loss_gradient"),
    ("replay", "weight"),
    ("replay", "negative_weight"),
)
"""What makes a loss of scored rows."""


@dataclass(frozen=True)
class WhatIfLoss:
    """An objective by name, in a configuration that is the run's in everything else."""

    name: str
    config: RunConfig

    @property
    def objective(self) -> AskedObjective:
        loss = self.config.loss
        return AskedObjective(self.name, _in_short(loss.fresh), _in_short(loss.replay))


def asked_losses(config: RunConfig, asked: Sequence[str]) -> list[WhatIfLoss]:
    """`asked` holds paths, names of objectives and `own`, which is meant if it is empty.

    Raises UserError for a file that is not there, a key that is unknown or no part of a loss, and a wrong value.
    """
    if not asked:
        return [WhatIfLoss(OWN, config)]
    twice = next((text for text, count in Counter(asked).items() if count > 1), None)
    if twice is not None:
        raise UserError(f"--loss must name each objective once, got {twice} twice.")
    stems = Counter(Path(text).stem for text in asked)
    losses = []
    for text in asked:
        if text == OWN:
            losses.append(WhatIfLoss(OWN, config))
        elif text in OBJECTIVE_NAMES:
            losses.append(WhatIfLoss(text, _with_objective(config, text)))
        else:
            path = Path(text)
            losses.append(WhatIfLoss(text if stems[path.stem] > 1 else path.stem, _from_file(config, path)))
    return losses


def _with_objective(config: RunConfig, name: str) -> RunConfig:
    """The run's own loss with this objective, its options at their defaults, for every stream."""
    stream: dict[str, Any] = {"objective": name}
    if name == "exgrpo":  # whose ratio is current over behavior
        stream |= {"anchor": "behavior", "correction": "none"}
    given = {"loss": dict.fromkeys(("fresh", "replay"), stream) | {"hinted": None}}
    return load_over(to_plain(config), given, {}, source=f"--loss {name}")


def _from_file(config: RunConfig, path: Path) -> RunConfig:
    if not path.exists() and not is_config_file(path.name):
        raise UserError(
            f"--loss must be a YAML file, {OWN}, or one of {', '.join(OBJECTIVE_NAMES)}, got {shown(str(path))}."
        )
    given, places = read_keys(path)
    found = load_over(to_plain(config), given, places, source=str(path))
    for keys, place in places.items():
        if not any(keys[: len(known)] == known or known[: len(keys)] == keys for known in _KEYS):
            allowed = ", ".join(".".join(known) for known in _KEYS)
            raise UserError(
                f"{place}: {'.'.join(keys)} must be left out of a loss, got a key that is no part of one. "
                f"It may hold: {allowed}."
            )
    return found


def _in_short(stream: StreamLossSection) -> str:
    parts = [stream.objective.name, f"anchor {stream.anchor}"]
    if not isinstance(stream.correction, NoCorrection):
        parts.append(f"{stream.correction.kind} by {stream.correction.level}")
    return ", ".join(parts)
