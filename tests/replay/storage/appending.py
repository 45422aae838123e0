"""A program to run under a disk that fails: appends rows one by one and tells, after each, what became of it.

`python -m tests.replay.storage.appending FILE COUNT`
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

from replay import ReplayError, ReplayStore
from tests.fakes.records import trajectory


def main(path: Path, count: int) -> None:
    with closing(ReplayStore.open(path)) as store:
        for number in range(count):
            id = f"{number:05d}"
            try:
                store.append([], [], [trajectory(id)])
                print(f"stored {id}", flush=True)
            except ReplayError as error:
                print(f"refused {id} {error}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
