"""The objectives that `replay whatif` is asked about: files of loss keys and names, each over a run's own loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentloop.analysis.whatif.result import AskedObjective
from agentloop.config import RunConfig
from agentloop.config.config_file import is_config_file, load_over, read_keys, to_plain
from agentloop.config.sections.loss import OBJECTIVE_NAMES, LossSection, StreamLossSection
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
_STREAMS = ("fresh", "replay")


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
    """The run's own loss with this objective, its options at their defaults, for both streams."""
    stream: dict[str, Any] = {"objective": name}
    if name == "exgrpo":  # whose ratio is current over behavior
        stream |= {"anchor": "behavior", "correction": {"kind": "none"}}
    options = {key: {name: values[name]} if name in values else {} for key, values in _defaults().items()}
    given = {"loss": {key: stream | options[key] for key in _STREAMS}}
    return load_over(_without_options(to_plain(config), given), given, {}, source=f"--loss {name}")


def _from_file(config: RunConfig, path: Path) -> RunConfig:
    if not path.exists() and not is_config_file(path.name):
        raise UserError(
            f"--loss must be a YAML file, {OWN}, or one of {', '.join(OBJECTIVE_NAMES)}, got {shown(str(path))}."
        )
    given, places = read_keys(path)
    whole = to_plain(config)
    found = load_over(_without_options(whole, given), given, places, source=str(path))
    for keys, place in places.items():
        if not any(keys[: len(known)] == known or known[: len(keys)] == keys for known in _KEYS):
            allowed = ", ".join(".".join(known) for known in _KEYS)
            raise UserError(
                f"{place}: {'.'.join(keys)} must be left out of a loss, got a key that is no part of one. "
                f"It may hold: {allowed}."
            )
    return found


def _without_options(whole: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The run's configuration without what was set for what `given` replaces.

    Bounds of `ppo_clip` mean nothing to `gspo`, and are refused with it.
    """
    loss, asked = dict(whole["loss"]), given.get("loss")
    for stream in _STREAMS:
        new = asked.get(stream) if isinstance(asked, Mapping) else None
        if not isinstance(new, Mapping):
            continue
        kept, defaults = dict(loss[stream]), _defaults()[stream]
        used = [new.get(key, kept[key]) for key in ("objective", "missing_log_probs")]
        kept |= {name: defaults[name] for name in OBJECTIVE_NAMES if name in kept and name not in used}
        if new.get("objective", kept["objective"]) != kept["objective"]:
            kept["options"] = {}
        correction, kind = new.get("correction"), kept["correction"]["kind"]
        if isinstance(correction, Mapping) and correction.get("kind", kind) != kind:
            kept["correction"] = defaults["correction"]
        loss[stream] = kept
    return {**whole, "loss": loss}


def _defaults() -> dict[str, dict[str, Any]]:
    """The default keys of either stream's loss."""
    return LossSection().model_dump(mode="json", include=set(_STREAMS))


def _in_short(stream: StreamLossSection) -> str:
    parts = [stream.objective, f"anchor {stream.anchor}"]
    if stream.correction.kind != "none":
        parts.append(f"{stream.correction.kind} by {stream.correction.level}")
    return ", ".join(parts)
