"""Seeds derived from the run's seed, one per purpose, so that no purpose can disturb another."""

import hashlib


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Derive a 63-bit seed for `purpose`, which is equal on every machine and in every process."""
    text = "/".join([str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
