"""Who starts an engine leaves a note when it ends, so that nobody waits for what will not come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from agentloop.errors import UserError, one_line


@contextmanager
def noted_end(folder: Path, port: int) -> Iterator[None]:
    """Within, an engine is started and watched at this port; why that ended is then in a file of `folder`."""
    note = _note(folder, port)
    note.parent.mkdir(parents=True, exist_ok=True)
    note.unlink(missing_ok=True)
    reason = "it was stopped"
    try:
        yield
    except BaseException as error:
        reason = str(error) if isinstance(error, UserError) else one_line(error)
        raise
    finally:
        note.write_text(reason)


def last_end(folders: Sequence[Path], url: str) -> tuple[float, str] | None:
    """When the last starter of the engine at `url` ended, in seconds of the epoch, and why; None: none has.

    One that has been started since takes the note away.
    """
    notes = [_note(folder, urlsplit(url).port or 0) for folder in folders]
    ends = [(note.stat().st_mtime, note.read_text()) for note in notes if note.exists()]
    return max(ends, default=None)


def _note(folder: Path, port: int) -> Path:
    return folder / f"engine-{port}.ended"
