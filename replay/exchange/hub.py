"""Rows to and from a dataset repository of Hugging Face's hub, `hf:NAME`, through its own client."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from context.wording import excerpt, visible
from replay.exchange.files import PARQUET, ExchangeError

_PREFIX = "hf:"
_ALL_ROWS = f"*{PARQUET}"


def is_on_hub(place: str) -> bool:
    return place.startswith(_PREFIX)


@contextmanager
def published(place: str, *, public: bool, force: bool) -> Iterator[Path]:
    """A folder whose files become those of the repository `place` when the block ends without an error.

    The repository is made, private unless `public`, before the block; of one that is there already neither who may
    read it is changed nor, unless `force`, the rows that it holds. Raises ExchangeError.
    """
    from huggingface_hub import HfApi  # here: it takes time, and what is not on the hub needs none of it

    api, name, kind = HfApi(), place.removeprefix(_PREFIX), "dataset"
    with _explained(place, "write"):
        name = api.create_repo(name, repo_type=kind, private=not public, exist_ok=True).repo_id
        info = api.dataset_info(name)
    if info.private == public:
        wanted, change = ("public", "leave out") if public else ("private", "add")
        raise ExchangeError(
            f"{place} must be {wanted}, got a repository that is not. Choose another name, or {change} --public."
        )
    if not force and any(file.rfilename.endswith(PARQUET) for file in info.siblings or ()):
        raise ExchangeError(f"{place} must hold no rows yet, got some. Choose another name, or replace with --force.")
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
        with _explained(place, "write"):
            api.upload_folder(repo_id=name, repo_type=kind, folder_path=folder, delete_patterns=_ALL_ROWS)


def fetched(place: str) -> Path:
    """The folder in which the hub's client keeps the rows of `hf:NAME` or `hf:NAME@REVISION`."""
    from huggingface_hub import snapshot_download

    name, _, revision = place.removeprefix(_PREFIX).partition("@")
    with _explained(place, "read"):
        kept = snapshot_download(name, repo_type="dataset", revision=revision or None, allow_patterns=_ALL_ROWS)
    if not os.path.isdir(kept):  # which is made with its first file
        raise ExchangeError(f"{place} must hold files in {PARQUET}, got none. Check the name.")
    return Path(kept)


@contextmanager
def _explained(place: str, what: str) -> Iterator[None]:
    """What the client raises becomes one line."""
    from huggingface_hub import is_offline_mode
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx's, of the version it uses
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        reason = "HF_HUB_OFFLINE is set" if is_offline_mode() else f"{type(error).__name__}: {error}".splitlines()[0]
        raise ExchangeError(
            f"{place} must be a dataset repository that you may {what}, got {visible(excerpt(reason, 150))}. Check the "
            "name, the login (hf auth login, or HF_TOKEN) and the network."
        ) from error
