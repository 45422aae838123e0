"""Reads the rows of a user's data set from JSONL, Parquet or the `datasets` library, and splits and hashes them."""

import datetime
import decimal
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentloop.config.sections.environments import TasksSection
from agentloop.errors import UserError, needing, one_line, shortened
from replay.exchange.files import ExchangeError, is_parquet, lines, opened
from replay.exchange.json_text import BadRow, read_json

Row = Mapping[str, Any]
HUGGING_FACE = "hf:"
_SAVED = ("dataset_dict.json", "state.json")
"""Files that `save_to_disk` of the `datasets` library writes into a folder."""
_PLACEHOLDER = "{split}"
_FIELD = "split"
_TRAIN = "train"
Side = Literal["train", "held-out"]
SIDES: tuple[Side, ...] = ("train", "held-out")
MOST_READ = 100_000
"""Rows of a side that are read as tasks before a run begins; of more rows so many are picked at equal distances."""


@dataclass(frozen=True)
class TaskRows:
    """The rows that a run trains on, and the rows that it is evaluated on."""

    train: Sequence[Row]
    held_out: Sequence[Row]
    digest: str
    """A digest of the contents in their order: a resumed run must find the same rows."""
    shared: int
    """Number of held-out rows that are also training rows; above 0 only where the user named a split to hold out."""
    numbers: Mapping[Side, Sequence[int]]
    """The number that each row of a side has in its split, from 0."""
    own_split: bool
    """Whether the held-out rows are a split of their own, so that their numbers begin anew."""

    def of(self, side: Side) -> Sequence[Row]:
        return self.train if side == "train" else self.held_out

    def place(self, side: Side, position: int) -> str:
        """Name a row by its number in the user's data, from 1."""
        row = "held-out row" if self.own_split and side == "held-out" else "row"
        return f"{row} {self.numbers[side][position] + 1}"

    def summary(self) -> str:
        twice = f", {self.shared:,} of these also to train on" if self.shared else ""
        return f"{len(self.train):,} to train on, {len(self.held_out):,} held out{twice}"


def load_rows(section: TasksSection) -> TaskRows:
    """Load the rows that `tasks` names. Raises UserError for rows that can't be read, split or told apart."""
    data = section.data or ""
    rows = _split(section, section.split)
    digests = [_digest(row, f"{data}, row {number}") for number, row in enumerate(rows, 1)]
    if section.held_out is not None:
        held_out = _split(section, section.held_out)
        others = [_digest(row, f"{data}, held-out row {number}") for number, row in enumerate(held_out, 1)]
        shared = sum(map(set(digests).__contains__, others))
        numbers: dict[Side, Sequence[int]] = {"train": range(len(rows)), "held-out": range(len(held_out))}
        return TaskRows(rows, held_out, digest_of([*digests, "", *others]), shared, numbers, own_split=True)
    there = held_out_by_content(digests, section.held_out_share)
    kept, away = ([number for number, held in enumerate(there) if held is side] for side in (False, True))
    if not kept or not away:
        raise UserError(
            f"tasks.data must hold rows to train on and others to evaluate on, got {len(rows)} in {data!r} with "
            f"{len(set(digests))} contents. Name a split with tasks.held_out, or add rows."
        )
    digest = digest_of([*digests, str(section.held_out_share)])
    return TaskRows(_chosen(rows, kept), _chosen(rows, away), digest, 0, {"train": kept, "held-out": away}, False)


def _chosen(rows: Any, numbers: Sequence[int]) -> Sequence[Row]:
    """Select rows by number; a data set of the library, which may be larger than memory, does so itself."""
    found: Sequence[Row] = [rows[number] for number in numbers] if isinstance(rows, list) else rows.select(numbers)
    return found


def held_out_by_content(digests: Sequence[str], share: float) -> list[bool]:
    """Choose rows to hold out, at least one, by their content alone, so that new rows don't move the others."""
    most = max(int(share * 2**64), min(int(digest[:16], 16) for digest in digests))
    return [int(digest[:16], 16) <= most for digest in digests]


def _split(section: TasksSection, name: str | None) -> Sequence[Row]:
    data = section.data or ""
    if data.startswith(HUGGING_FACE) or Path(data).is_dir():
        rows = _hugging_face(section, data.removeprefix(HUGGING_FACE), name or _TRAIN)
    elif _PLACEHOLDER in data:
        rows = _file(data.replace(_PLACEHOLDER, name or _TRAIN))
    else:
        rows = _with_split(data, _file(data), name)
    if not len(rows):
        raise UserError(f"tasks.data must hold at least one row, got none in {data!r}. Add rows.")
    return rows


def _with_split(data: str, rows: Sequence[Row], name: str | None) -> Sequence[Row]:
    """Select a file's rows of one split; a file without the field `split` is a single split without a name."""
    named = [row.get(_FIELD) for row in rows]
    if name is None and not any(named):
        return rows
    wanted = name or _TRAIN
    found = [row for row, split in zip(rows, named, strict=True) if split == wanted]
    if not found:
        there = ", ".join(sorted({str(split) for split in named if split is not None})) or "none in any row"
        raise UserError(
            f"tasks.data must hold rows whose field 'split' is {wanted!r}, got {there} in {data!r}. "
            "Name one of these, or write {split} for the split's name into the path."
        )
    return found


def _file(path: str) -> Sequence[Row]:
    place = Path(path)
    if place.suffix == ".csv":
        raise UserError(
            f"tasks.data must end in .jsonl, .jsonl.gz or .parquet, got {path!r}. Write it as one: "
            f"pandas.read_csv({path!r}).to_json('rows.jsonl', orient='records', lines=True)."
        )
    with _explained(str(place.absolute())):
        if not is_parquet(place):
            return list(_jsonl(place))
        with needing("parquet", "tasks.data"):
            import pyarrow.parquet
        with opened(place) as raw:
            rows: list[Row] = pyarrow.parquet.read_table(raw).to_pylist()
        return rows


def _jsonl(path: Path) -> Iterator[Row]:
    for number, line in enumerate(lines(path), 1):
        if not line.strip():
            continue
        try:
            row = read_json(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: the line must be JSON ({error}). Mend the file.") from None
        if not isinstance(row, dict):
            raise UserError(
                f"{path}:{number}: the line must be a JSON object, got {shortened(str(row))}. Mend the file."
            )
        yield row


def _hugging_face(section: TasksSection, name: str, split: str) -> Sequence[Row]:
    with _explained(f"{HUGGING_FACE}{name}"):
        with needing("datasets", "tasks.data"):
            import datasets
        datasets.disable_progress_bars()
        if Path(name).is_dir() and any((Path(name) / kind).is_file() for kind in _SAVED):
            found = datasets.load_from_disk(name)
            whole = found if isinstance(found, datasets.DatasetDict) else {_TRAIN: found}
            if split not in whole:
                raise ValueError(f"no split {split!r} among {', '.join(whole)}")
            rows: Sequence[Row] = whole[split]
        else:
            rows = datasets.load_dataset(name, section.subset, split=split, revision=section.revision)
    return rows


@contextmanager
def _explained(place: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except ExchangeError as error:
        raise UserError(str(error).replace("FILE", "tasks.data", 1)) from error
    except BadRow as error:
        raise UserError(f"{place}: {error} Mend the file.") from error
    except Exception as error:
        problem = one_line(error).rstrip(".")
        raise UserError(
            f"tasks.data must be readable rows, got {place!r} with {problem}. Check its name and splits."
        ) from error


def as_json(value: Any) -> Any:
    """Convert a value that JSON lacks: NumPy's to Python's, dates to text. Raises TypeError for any other type."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(type(value).__name__)


def _digest(row: Row, where: str) -> str:
    try:
        text = json.dumps(row, sort_keys=True, default=as_json)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"tasks.data must hold texts, numbers, dates and lists of them, got {one_line(error)} in {where}. "
            "Leave such columns out."
        ) from error
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def digest_of(digests: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()
