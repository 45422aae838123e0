"""Why an `agentloop engine` that somebody started has ended: a file tells those that wait for it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from agentloop.errors import TrainingStopped, UserError, one_line


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
        reason = str(error) if isinstance(error, (UserError, TrainingStopped)) else one_line(error)
        raise
    finally:
        note.write_text(reason)


def ended_before(urls: Sequence[str], folders: Sequence[Path], *, since: float) -> str:
    """What to say of engines that ended before `since`, in seconds. Raises UserError where one has ended after it."""
    said = ""
    for url in urls:
        for note in (_note(folder, urlsplit(url).port or 0) for folder in folders):
            if note.exists():
                if note.stat().st_mtime >= since:
                    raise UserError(
                        f"engine.urls must answer, got nothing from {url}, whose `agentloop engine` has ended: "
                        f"{note.read_text()} Start it again, then this."
                    )
                said += f" The last `agentloop engine` there has ended: {note.read_text()}"
    return said


def _note(folder: Path, port: int) -> Path:
    return folder / f"engine-{port}.ended"
