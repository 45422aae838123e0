"""Where a buffer is: from RUN (a folder, a file or a URL) to the database, the run and its tokenizer."""

import json
import os
from pathlib import Path
from typing import NamedTuple

from context.tokens.codec import TokenCodec
from replay.errors import ReplayError
from replay.storage.databases import Location

DATABASE = "replay.sqlite"
"""The database's name in a run folder whose configuration names no other."""
METRICS = "metrics.sqlite"
"""The database of a run of `agentloop sft`, which has no buffer."""
MODEL, START = "model", "start"
"""Folders in a run folder: the trained model, and what the run began with."""
BEST = "best"
"""Folder in a run folder: the policy with the best held-out success, in a folder named by its iteration."""
LOCK = "lock"
"""The file in a run folder that its trainer locks."""


class RunIdentity(NamedTuple):
    """The facts about a run in its folder."""

    id: str | None
    database: str | None
    """The URL its configuration names; None: the file in the folder."""


def run_identity(run_folder: Path) -> RunIdentity:
    """The run's identity by the folder's run.json. All is None in a folder without a readable one."""
    try:
        identity = json.loads((run_folder / "run.json").read_text(encoding="utf-8"))
        return RunIdentity(identity["id"], identity["config"]["replay"].get("database"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return RunIdentity(None, None)


def own_folder(run_folder: Path | None, run: str) -> Path | None:
    """`run_folder` if it belongs to this run, otherwise None: runs may share a database, and each has its folder."""
    return run_folder if run_folder is not None and run_identity(run_folder).id == run else None


def run_folders(runs: Path) -> list[Path]:
    """The run folders in `runs`. The one written last comes first; among equal times, the higher number."""
    written = [
        (_last_written(folder), folder.name, folder)
        for folder in (runs.iterdir() if runs.is_dir() else ())
        if os.path.isfile(_file(folder)) or run_identity(folder).database is not None
    ]
    return [folder for _, _, folder in sorted(written, reverse=True)]


def _file(run_folder: Path) -> Path:
    metrics = run_folder / METRICS
    return metrics if os.path.exists(metrics) else run_folder / DATABASE


def is_folder_of_runs(path: Path) -> bool:
    """Whether the folder holds runs, and is no run itself. A folder that can't be read counts as none."""
    is_run = os.path.exists(path / DATABASE) or run_identity(path).id is not None
    return not is_run and os.access(path, os.R_OK | os.X_OK) and bool(run_folders(path))


def newest_run_folder(runs: Path = Path("runs")) -> Path:
    """The run folder whose buffer was written last. Raises ReplayError if there is none."""
    found = [folder for folder in run_folders(runs) if _file(folder).name == DATABASE]
    if not found:
        others = (file for file in runs.glob("*/run.json") if _file(file.parent).name == DATABASE)
        begun = max(others, key=lambda file: file.stat().st_mtime_ns, default=None)
        none = f"RUN must be given when there is no run under {runs.absolute()}, got none. Name a run folder."
        raise ReplayError(_has_none_yet(begun.parent) if begun else none)
    return found[0]


def _has_none_yet(folder: Path) -> str:
    return f"RUN must have a buffer, got {folder}: a run makes it once its model is ready. Then ask again."


def _last_written(folder: Path) -> int:
    """The time when the folder was last written. A run with its buffer on a server writes its metrics here."""
    files = [folder / DATABASE] if (folder / DATABASE).is_file() else [folder / "metrics.jsonl", folder / "run.json"]
    return max(file.stat().st_mtime_ns for file in files if file.is_file())


def place(run: str | None) -> tuple[Location, Path | None, str | None]:
    """The database that RUN names, the run folder, and the run's id if other runs may share the database."""
    if run is not None and "://" in run:
        return run, None, None
    path = newest_run_folder() if run is None else Path(run)
    if not os.path.isdir(path):
        return path, path.parent, None
    if is_folder_of_runs(path):
        raise ReplayError(f"RUN must be one run, got {path}, a folder of runs. See: agentloop inspect {path}")
    identity = run_identity(path)
    if identity.database is None:
        if identity.id is not None and not _file(path).exists():
            raise ReplayError(_has_none_yet(path))
        return _file(path), path, None
    return identity.database, path, identity.id


def split_best(run: Path | str) -> tuple[Path, bool]:
    """The run's folder in `RUN` or `RUN:best`, and whether its best policy is meant."""
    return Path(str(run).removesuffix(f":{BEST}")), str(run).endswith(f":{BEST}")


def best_policy(run: Path) -> Path:
    """The weights of the run's best policy, a Hugging Face folder. Raises ReplayError if there is none."""
    found = max(run.glob(f"{BEST}/*/COMPLETE"), default=None)
    if found is None:
        raise ReplayError(
            f"RUN:best must be a run with a best policy, got none in {run}. Runs keep it with checkpoint.best: "
            "eval/success; name another policy."
        )
    return found.parent


def newest_model(run: Path) -> Path | None:
    """The newest whole weights of a run of `train` or `sft`, a Hugging Face folder; None if it has none yet."""
    newest = max(run.glob("checkpoints/*/COMPLETE"), default=None)
    return run / MODEL if (run / MODEL).exists() else newest and newest.parent / MODEL


def tokenizer(folder: Path | None) -> TokenCodec | None:
    """The tokenizer of the run in `folder`; None: tokens are shown as ids."""
    path = None if folder is None else folder / START / "tokenizer.json"
    return None if path is None or not path.is_file() else TokenCodec(path.read_text(encoding="utf-8"))
