"""What programs do to the files of a folder, recorded by strace, and what a power cut may leave of it on the disk.

Until a file is flushed, any of its changes may be missing, torn at sectors, or older than others; until a folder is
flushed, so may what was made, renamed and removed in it. What a flush that returned had before it is there.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

STRACE = shutil.which("strace")

SECTOR = 512
STYLES = ("flushed only", "all", "some", "torn", "reordered")
"""What is kept of unflushed changes: none, all, whole ones, sectors of them, and those in any order."""

_CALLS = "openat,write,pwrite64,fsync,fdatasync,ftruncate,rename,unlink"
_OTHERS = (
    "open,creat,writev,pwritev,pwritev2,truncate,fallocate,copy_file_range,sendfile,sync,syncfs,sync_file_range,"
    "renameat,renameat2,unlinkat,link,linkat,symlink"
)
"""What a recording must not hold of these files: nothing here says what it leaves."""
_NAMED = re.compile(r"\w+\(\d+<((?:\\x\w\w)*)>")
_STRING = re.compile(r'"((?:\\x\w\w)*)"')
_MEMORY = "-shm"
"""Ends the names of files that are shared memory: a machine that starts has none."""

Span = tuple[int, int]
"""The moments at which a call began and ended."""


@dataclass(eq=False)
class File:
    """One file, whatever its name, with what was done to it."""

    was: bytes = b""
    changes: list[tuple[Span, int, bytes | None]] = field(default_factory=list)
    """A place and what was written there; nothing: the file was cut there."""
    flushes: list[Span] = field(default_factory=list)


@dataclass
class Recording:
    """A folder's life while some programs ran."""

    were: dict[str, File] = field(default_factory=dict)
    """The files by name in the beginning."""
    renamings: list[tuple[Span, str, File | None]] = field(default_factory=list)
    """A name and the file it stands for from then on."""
    flushes: list[Span] = field(default_factory=list)
    """Of the folder."""
    said: list[tuple[int, str]] = field(default_factory=list)
    """What the programs printed, and when."""
    stretches: list[list[int]] = field(default_factory=lambda: [[]])
    """Moments at which something was done, from one flush or change of a name to the next."""

    def told(self, moment: int) -> list[str]:
        return [line for when, line in self.said if when < moment]

    def leave(self, folder: Path, moment: int, style: str, chance: random.Random) -> None:
        """Make the folder what a power cut at that moment leaves."""
        kept = _kept(self.renamings, self.flushes, moment, style, chance)
        names: dict[str, File | None] = dict(self.were)
        for _, name, file in kept[0] + sorted(kept[1], key=lambda change: change[0]):
            names[name] = file
        for name, found in names.items():
            if found is not None:
                (folder / name).write_bytes(_content(found, moment, style, chance))


Change = TypeVar("Change", bound=tuple[object, ...])


def _kept(
    changes: Sequence[Change], flushes: Sequence[Span], moment: int, style: str, chance: random.Random
) -> tuple[list[Change], list[Change]]:
    """What is sure to be there, and what of the rest there is."""
    flushed = max((begun for begun, ended in flushes if ended < moment), default=-1)
    sure = [change for change in changes if change[0][1] < flushed]  # type: ignore[index]
    unsure = [change for change in changes if change[0][1] >= flushed and change[0][0] < moment]  # type: ignore[index]
    share = {"flushed only": 0.0, "all": 1.0}.get(style, chance.random())
    kept = [change for change in unsure if chance.random() < share]
    if style == "reordered":
        chance.shuffle(kept)
    return sure, kept


def _content(file: File, moment: int, style: str, chance: random.Random) -> bytes:
    sectors = style in ("torn", "reordered")
    torn = [each for change in file.changes for each in (_sectors(change) if sectors else [change])]
    sure, unsure = _kept(torn, file.flushes, moment, style, chance)
    content = bytearray(file.was)
    for _, place, data in (*sure, *unsure):
        if data is None:
            del content[place:]
        content.extend(bytes(max(0, place - len(content))))
        content[place : place + len(data or b"")] = data or b""
    return bytes(content)


def _sectors(change: tuple[Span, int, bytes | None]) -> Iterator[tuple[Span, int, bytes | None]]:
    span, place, data = change
    if data is None:
        yield change
        return
    start = 0
    while start < len(data):
        end = start + SECTOR - (place + start) % SECTOR
        yield span, place + start, data[start:end]
        start = end


def record(folder: Path, program: Sequence[str]) -> Recording:
    """Run a program that writes into the folder alone what matters."""
    recording = Recording({file.name: File(file.read_bytes()) for file in folder.iterdir()})
    trace = folder.with_name(f"{folder.name}.trace")
    options = ["-f", "-y", "-xx", "-qq", "-s", str(1 << 20), "-e", "signal=none", "-e", f"trace={_CALLS},{_OTHERS}"]
    subprocess.run([str(STRACE), *options, "-o", str(trace), *program], check=True, stdout=subprocess.DEVNULL)
    names = dict(recording.were)
    for span, text in _calls(trace):
        if _apply(recording, names, folder, span, text):
            recording.stretches[-1] += [span[0], span[1] + 1]
            if not text.startswith(("pwrite64", "ftruncate")):
                recording.stretches.append([span[1] + 1])
    trace.unlink()
    return recording


def _calls(trace: Path) -> Iterator[tuple[Span, str]]:
    """Each call that succeeded, with its moments, in the order of their ends."""
    begun: dict[str, tuple[int, str]] = {}
    with trace.open(encoding="ascii") as lines:
        for moment, line in enumerate(lines):
            process, _, text = line.strip().partition(" ")
            text = text.lstrip()
            start = moment
            if text.endswith("<unfinished ...>"):
                begun[process] = moment, text.removesuffix("<unfinished ...>")
                continue
            if text.startswith("<... "):
                start, head = begun.pop(process)
                text = head + text.partition(" resumed>")[2]
            if not text.rpartition(" = ")[2].startswith("-1"):
                yield (start, moment), text


def _apply(recording: Recording, names: dict[str, File], folder: Path, span: Span, text: str) -> bool:
    """Whether it was about these files."""
    call = text.partition("(")[0]
    strings = [_decoded(string) for string in _STRING.findall(text)]
    if call == "write" and text.startswith("write(1<"):
        recording.said += [(span[0], line) for line in strings[0].decode().splitlines()]
        return True
    named = _NAMED.match(text)
    paths = [_decoded(named[1])] if named else strings
    inside = [Path(path.decode()) for path in paths if path.startswith(bytes(folder))]
    if call == "openat":
        inside = [Path(strings[0].decode())] if strings[0].startswith(bytes(folder)) and "O_CREAT" in text else []
    if not inside or any(path.name.endswith(_MEMORY) for path in inside):
        return False
    name = inside[0].name
    if call == "openat":
        if name not in names:
            _rename(recording, names, span, name, File())
        assert "O_TRUNC" not in text or not names[name].was
    elif call in ("fsync", "fdatasync"):
        (recording if inside[0] == folder else names[name]).flushes.append(span)
    elif call == "pwrite64":
        names[name].changes.append((span, int(text.rpartition(")")[0].rpartition(",")[2]), strings[-1]))
    elif call == "ftruncate":
        names[name].changes.append((span, int(text.rpartition(")")[0].rpartition(",")[2]), None))
    elif call == "rename":
        _rename(recording, names, span, inside[1].name, names[name])
        _rename(recording, names, span, name, None)
    elif call == "unlink":
        _rename(recording, names, span, name, None)
    else:
        raise AssertionError(f"nothing is known of {call}")
    return True


def _rename(recording: Recording, names: dict[str, File], span: Span, name: str, file: File | None) -> None:
    recording.renamings.append((span, name, file))
    if file is None:
        del names[name]
    else:
        names[name] = file


def _decoded(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def images(
    recording: Recording, folder: Path, count: int, check: Callable[[Path, list[str]], None], *, name: str
) -> dict[str, int]:
    """Check what so many power cuts leave, each in a new folder; how many there were of each style."""
    chance = random.Random(0)
    counts = dict.fromkeys(STYLES, 0)
    for number in range(count):
        style = STYLES[number % len(STYLES)]
        moment = chance.choice(chance.choice(recording.stretches))
        image = folder / f"image-{number}"
        image.mkdir()
        recording.leave(image, moment, style, chance)
        try:
            check(image / name, recording.told(moment))
        except BaseException as error:
            error.add_note(f"image {number}: cut at {moment}, kept {style}, left in {image}")
            raise
        shutil.rmtree(image)
        counts[style] += 1
    return counts
