"""The shell commands that pages show. A command prints in a terminal what its page shows."""

import re
import shlex
from collections.abc import Mapping, Sequence

from replay import questions
from replay.open_buffer import OpenBuffer
from replay.questions import Query

_PLAIN = re.compile(r"[^\"$`\\!\x00-\x1f]+")
"""Text that an interactive shell reads as it is between double quotes."""


def quote_command(words: Sequence[str]) -> str:
    """Quote a command as a person would: a filter, which holds single quotes, is put in double quotes."""
    return " ".join(f'"{word}"' if "'" in word and _PLAIN.fullmatch(word) else shlex.quote(word) for word in words)


def list_command(source: OpenBuffer, query: Query) -> str:
    words, filters = source.run_words, list(query.filters)
    if query.run != source.run and len(questions.run_names(source.store)) > 1:
        # A run's folder stands for its run alone; other runs need the database.
        words = words if source.run is None else [source.store.url]
        filters += [] if query.run is None else [f"run == {query.run!r}"]
    command = ["agentloop", "replay", "ls", *words, "--sort", str(query.sort)]
    command += ["--ascending"] if query.ascending else []
    command += [word for condition in filters for word in ("--where", condition)]
    return quote_command(command)


def mix_command(source: OpenBuffer, run: str, settings: Mapping[str, str]) -> str:
    """Return the command that previews a batch by these settings of `replay`, in place of the run's own."""
    words = ["agentloop", "replay", "mix", *source.words_of(run)]
    return shlex.join([*words, *(word for key in settings for word in ("--set", f"replay.{key}={settings[key]}"))])


def rescore_command(source: OpenBuffer, id: str) -> str | None:
    """Return the command that rescores one trajectory. None: no folder of a run was opened, so there are no weights."""
    if source.folder is None or source.own_run is None or source.named is None:
        return None
    return quote_command(["agentloop", "replay", "rescore", source.named, "--where", f"id == {id!r}"])
