"""Less replay while the policy has moved away from it, more again when it hasn't: a closed loop over the ESS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EssRule:
    """Multiplicative: lowered fast, raised slowly, so that it settles under the fraction that hurts."""

    floor: float
    """ESS under which a bucket is too far off-policy."""
    lower_by: float
    """Factor of one step down, in (0, 1)."""
    raise_by: float
    """Factor of one step up, above 1."""
    least: float
    """The factor never falls below this, in (0, 1]: without any replay there would be no ESS to raise it by."""

    def next_factor(self, factor: float, ess_by_age: Mapping[str, float]) -> float:
        """The factor of the next iteration's fraction, in [least, 1].

        One bucket under the floor lowers it: the oldest rows go bad first, and a mean over all would hide them. A
        bucket of one row has ESS 1, and an iteration without replay has no bucket: both let it rise.
        """
        if any(ess < self.floor for ess in ess_by_age.values()):
            return max(self.least, factor * self.lower_by)
        return min(1.0, factor * self.raise_by)
