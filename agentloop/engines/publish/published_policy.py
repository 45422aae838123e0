"""A published policy on disk: its weights, their hash, and the probe that proves an engine.

Nothing here imports torch; `agentloop.training.policies.weights_for_engines` writes what this reads.
"""

import fcntl
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentloop.errors import UserError

RECORD = "published.json"
MARKER = "COMPLETE"
"""The file that is written last: a folder without it is incomplete."""
_NOT_HASHED = frozenset({RECORD, MARKER})


NumberType = Literal["float32", "bfloat16", "float16"]
"""The type in which an engine stores weights and multiplies."""
Numbers = tuple[tuple[float, ...], ...]


class Probe(BaseModel):
    """The learner's log-probs of some tokens, in nats: computed in float32, with weights rounded as the engine's."""

    model_config = ConfigDict(frozen=True)

    number_type: NumberType
    rows: tuple[tuple[int, ...], ...] = Field(min_length=1)
    """Token ids: parts of the policy's recent replies, or given texts before it has any."""
    log_probs: Numbers
    """Log-probs at temperature 1 of each row's tokens but the first."""
    rounding: Numbers
    """By how much `log_probs` move when the learner multiplies in the engine's type; 0 in float32."""
    before: Numbers | None = None
    """The `log_probs` of the previous version's weights; None where these no longer existed."""
    temperature: float = Field(gt=0)
    next_ids: tuple[tuple[int, ...], ...]
    """The most likely next tokens after each row, the likeliest first."""
    next_log_probs: Numbers
    """The log-probs of `next_ids` at `temperature`."""
    next_rounding: Numbers


class PublishedPolicy(BaseModel):
    """The record that is stored next to the weights."""

    model_config = ConfigDict(frozen=True)

    run: str
    version: int = Field(ge=0)
    kind: Literal["full", "lora"]
    """full: every weight, with its own head; lora: an adapter (PEFT) for the model that the engine was started with."""
    sha256: str
    """The hash of the names and bytes of all other files in the folder."""
    probe: Probe

    @property
    def label(self) -> str:
        """An engine's label for these weights. It has the hash: a resumed run makes a version again, of other bytes."""
        return f"{self.run}@{self.version}-{self.sha256[:8]}"


def version_in(label: str, run: str) -> int | None:
    """Return the version in a label of this run; None for any other name."""
    found = re.fullmatch(re.escape(run) + "@([0-9]+)-[0-9a-f]{8}", label)
    return int(found[1]) if found else None


def read_published(folder: Path) -> PublishedPolicy:
    """Read the record of a complete folder, and check its hash. Raises UserError where the folder has changed."""
    try:
        policy = PublishedPolicy.model_validate_json((folder / RECORD).read_bytes())
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{error.error_count()} mistakes in it"
        raise UserError(
            f"a published policy must have a {RECORD}, got {reason} in {folder}. Publish it again."
        ) from error
    found = folder_hash(folder)
    if found != policy.sha256:
        raise UserError(
            f"a published policy must be the bytes that were published, got sha256 {found[:12]} in place of "
            f"{policy.sha256[:12]} in {folder}. Copy it again."
        )
    return policy


def folder_hash(folder: Path) -> str:
    """Compute the sha256 of names and bytes of all files but the record and the marker."""
    whole = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name not in _NOT_HASHED:
            with path.open("rb") as file:
                whole.update(f"{name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()


def newest_published(folder: Path) -> Path | None:
    """Find the complete policy with the highest number in `folder`; None where there is none."""
    whole = [path.parent for path in folder.glob(f"*/{MARKER}") if path.parent.name.isdecimal()]
    return max((path for path in whole if (path / RECORD).exists()), key=lambda path: int(path.name), default=None)


@contextmanager
def one_publisher(policies: Path, url: str) -> Iterator[None]:
    """Hold a lock: nobody else on this machine publishes to the engine at `url` from the folder `policies` meanwhile.

    A learner and an engine's watcher both publish. If they publish at once, the weights of one get the name of the
    other. The newest policy must be looked up within the lock, too. A process that dies releases the lock.
    """
    policies.mkdir(parents=True, exist_ok=True)
    with (policies / f"publishing-{urlsplit(url).netloc.replace(':', '-')}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
