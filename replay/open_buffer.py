"""A buffer that was opened to be asked, and which of its runs is meant."""

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
    """Nothing may be written to the buffer that was opened."""


@dataclass(frozen=True)
class OpenBuffer:
    """One database that was opened, and what is known of the run whose it is."""

    store: ReplayStore
    folder: Path | None = None
    """The folder of the run whose database was opened; its tokenizer and checkpoints are there."""
    run: str | None = None
    """The run asked for, in a database that other runs may share; None: all of the database's."""
    tokenizer: Callable[[], TokenCodec | None] = lambda: None
    """The run's own; None: tokens are shown by their ids."""
    named: str | None = None
    """RUN as it was given; it may hold a password."""
    location: Location | None = None
    """Where labels and saved views are written; None: they are not."""

    @contextmanager
    def writing(self) -> Iterator[ReplayStore]:
        """The database, opened to be written, however this one was opened."""
        if self.location is None:
            raise ReadOnly("Labels and views must be changed where the buffer may be written: it is read only here.")
        with closing(ReplayStore.open(self.location)) as store:
            yield store

    @property
    def own_run(self) -> str | None:
        """The run asked for, or the one whose folder was opened."""
        return self.run or (run_identity(self.folder).id if self.folder else None)

    @property
    def run_words(self) -> list[str]:
        """RUN in the commands that pages show, where it is known: of a server's database without the password."""
        if self.named is None:
            return []
        return [self.store.url if "://" in self.named else self.named]

    def words_of(self, run: str) -> list[str]:
        """RUN and --run, in commands about that run."""
        several = self.run != run and len(run_names(self.store)) > 1
        return [*self.run_words, *(["--run", run] if several else [])]


@contextmanager
def open_buffer(run: str | None, *, read_only: bool = True) -> Iterator[OpenBuffer]:
    """What RUN names: a run's folder, a database file or URL, or the newest run. Raises ReplayError."""
    location, folder, id = place(run)
    found: TokenCodec | None = None

    def own_tokenizer() -> TokenCodec | None:
        """Looked for until it is there: a run that begins writes it after its database."""
        nonlocal found
        found = found or tokenizer(folder)
        return found

    with closing(ReplayStore.open(location, read_only=read_only)) as store, store.naming_damage():
        yield OpenBuffer(store, folder, id, own_tokenizer, run or str(folder), location)


def asked_run(buffer: OpenBuffer, name: str | None) -> str:
    """The id of the run called so; without a name the one of RUN's folder, or the only one that updated anything."""
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
