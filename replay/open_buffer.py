"""Opens a buffer to answer questions, and finds the run that they are about."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from context.tokens.codec import TokenCodec
from replay.errors import ReplayError
from replay.locate import place, run_identity, tokenizer
from replay.questions import run_names, runs
from replay.storage.databases import Location
from replay.store import ReplayStore


class ReadOnly(ReplayError):
    """The buffer was opened for reading only."""


@dataclass(frozen=True)
class OpenBuffer:
    """An open database, and the facts about the run that was opened."""

    store: ReplayStore
    folder: Path | None = None
    """The folder of the opened run, with its tokenizer and checkpoints."""
    run: str | None = None
    """The run asked for, in a database that runs may share; None: all runs of the database."""
    tokenizer: Callable[[], TokenCodec | None] = lambda: None
    """Returns the run's own tokenizer; None: tokens are shown as ids."""
    named: str | None = None
    """RUN as it was given; it may hold a password."""
    location: Location | None = None
    """The database to which labels are written; None: they are not written."""

    @contextmanager
    def writing(self) -> Iterator[ReplayStore]:
        """Open the same database for writing."""
        if self.location is None:
            raise ReadOnly("labels must be changed where the buffer may be written, got a read-only buffer.")
        with closing(ReplayStore.open(self.location)) as store:
            yield store

    @property
    def own_run(self) -> str | None:
        """The run that was named, or else the run whose folder was opened."""
        return self.run or (run_identity(self.folder).id if self.folder else None)

    @property
    def run_words(self) -> list[str]:
        """RUN in the commands that pages show, if it is known. A server's URL comes without its password."""
        if self.named is None:
            return []
        return [self.store.url if "://" in self.named else self.named]

    def words_of(self, run: str) -> list[str]:
        """Make the words that name the run in commands: RUN, and --run if the database has several runs."""
        several = self.run != run and len(run_names(self.store)) > 1
        return [*self.run_words, *(["--run", run] if several else [])]


@contextmanager
def open_buffer(run: str | None, *, read_only: bool = True) -> Iterator[OpenBuffer]:
    """The buffer that RUN names: a run's folder, a database file or URL; None: the newest run. Raises ReplayError."""
    location, folder, id = place(run)
    found: TokenCodec | None = None

    def own_tokenizer() -> TokenCodec | None:
        """Look for the tokenizer until it is found, because a new run writes it after its database."""
        nonlocal found
        found = found or tokenizer(folder)
        return found

    with closing(ReplayStore.open(location, read_only=read_only)) as store, store.naming_damage():
        yield OpenBuffer(store, folder, id, own_tokenizer, run or str(folder), location)


def find_run(buffer: OpenBuffer, name: str | None) -> str:
    """The id of the run with this name or id. Without a name it is the run of RUN's folder, or the only run with an
    iteration."""
    known = runs(buffer.store)
    found = [row for row in known if (name or buffer.own_run) in (row["id"], row["name"])]
    if not found and name is None:
        found = [row for row in known if row["iterations"]] or known
    if len(found) != 1:
        listed = ", ".join(f"{row['name']} ({row['id']})" for row in found or known) or "none"
        asked = f"got {name!r} where there are" if name else "got"
        raise ReplayError(
            f"RUN must be one run of {buffer.store.url}, {asked} {listed}. Give its folder, or its id with --run."
        )
    return str(found[0]["id"])
