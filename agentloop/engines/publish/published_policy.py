"""A published policy on disk: its weights, the hash that its number stands for, and the probe an engine has to pass.

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
"""Written last: a folder without it is not whole."""
_NOT_HASHED = frozenset({RECORD, MARKER})


NumberType = Literal["float32", "bfloat16", "float16"]
"""In which an engine holds its weights and multiplies."""
Numbers = tuple[tuple[float, ...], ...]


class Probe(BaseModel):
    """What the learner, its weights rounded as the engine's, says of some tokens in float32; log-probs are in nats."""

    model_config = ConfigDict(frozen=True)

    number_type: NumberType
    rows: tuple[tuple[int, ...], ...] = Field(min_length=1)
    """Token ids: parts of what the policy has said lately, or texts before it has said anything."""
    log_probs: Numbers
    """Of each row's tokens but the first, at temperature 1."""
    rounding: Numbers
    """What these move when the learner multiplies in the engine's type; 0 in float32."""
    before: Numbers | None = None
    """As `log_probs`, with the weights of the version before; None: they were not there any more."""
    temperature: float = Field(gt=0)
    next_ids: tuple[tuple[int, ...], ...]
    """The most likely next tokens after each row, the likeliest first."""
    next_log_probs: Numbers
    """Theirs at `temperature`."""
    next_rounding: Numbers


class PublishedPolicy(BaseModel):
    """The record next to the weights."""

    model_config = ConfigDict(frozen=True)

    run: str
    version: int = Field(ge=0)
    kind: Literal["full", "lora"]
    """full: every weight, with a head of its own; lora: an adapter (PEFT) for the model the engine was started with."""
    sha256: str
    """Over the names and bytes of all other files of the folder."""
    probe: Probe

    @property
    def label(self) -> str:
        """What an engine calls these weights; a run that goes on makes later versions again, of other bytes."""
        return f"{self.run}@{self.version}-{self.sha256[:8]}"


def version_in(label: str, run: str) -> int | None:
    """The version that a label of this run names; None for any other name."""
    found = re.fullmatch(re.escape(run) + "@([0-9]+)-[0-9a-f]{8}", label)
    return int(found[1]) if found else None


def read_published(folder: Path) -> PublishedPolicy:
    """Read the record of a whole folder and check its hash. Raises UserError where it is not what was published."""
    if not (folder / MARKER).exists():
        raise UserError(
            f"a published policy must be whole, got no {MARKER} in {folder}. Wait until it is written, or name another."
        )
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
    """The sha256 of names and bytes of all files but the record and the marker."""
    whole = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name not in _NOT_HASHED:
            with path.open("rb") as file:
                whole.update(f"{name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()


def newest_published(folder: Path) -> Path | None:
    """The whole policy with the highest number among those in `folder`; None for none."""
    whole = [path.parent for path in folder.glob(f"*/{MARKER}") if path.parent.name.isdecimal()]
    return max((path for path in whole if (path / RECORD).exists()), key=lambda path: int(path.name), default=None)


@contextmanager
def one_publisher(policies: Path, url: str) -> Iterator[None]:
    """Within, nobody else on this machine publishes to the engine at `url` out of the folder `policies`.

    A learner and an engine's watcher both publish: at the same time, one's weights would get the other's name. Which
    policy is the newest has to be looked up within, too. Whoever dies lets go.
    """
    policies.mkdir(parents=True, exist_ok=True)
    with (policies / f"publishing-{urlsplit(url).netloc.replace(':', '-')}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
