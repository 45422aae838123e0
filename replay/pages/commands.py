"""The commands that pages show, which ask in a terminal what the page asks."""

import re
import shlex
from collections.abc import Mapping, Sequence

from replay import questions
from replay.open_buffer import OpenBuffer
from replay.questions import Query

_PLAIN = re.compile(r"[^\"$`\\!\x00-\x1f]+")
"""Means the same between double quotes, also to a shell that people type into."""


def typed(words: Sequence[str]) -> str:
    """A command as a person would type it. Filters hold single quotes, which are easier to read between double ones."""
    return " ".join(f'"{word}"' if "'" in word and _PLAIN.fullmatch(word) else shlex.quote(word) for word in words)


def list_command(source: OpenBuffer, query: Query) -> str:
    words, filters = source.run_words, list(query.filters)
    if query.run != source.run and len(questions.run_names(source.store)) > 1:
        # A run's folder names its run alone; its database names all there are.
        words = words if source.run is None else [source.store.url]
        filters += [] if query.run is None else [f"run == {query.run!r}"]
    command = ["agentloop", "replay", "ls", *words, "--sort", str(query.sort)]
    command += ["--ascending"] if query.ascending else []
    command += [word for condition in filters for word in ("--where", condition)]
    return typed(command)


def mix_command(source: OpenBuffer, run: str, settings: Mapping[str, str]) -> str:
    """With these settings of `replay` in place of the run's own."""
    words = ["agentloop", "replay", "mix", *source.words_of(run)]
    return shlex.join([*words, *(word for key in settings for word in ("--set", f"replay.{key}={settings[key]}"))])


def rescore_command(source: OpenBuffer, id: str) -> str:
    """For one trajectory of this database, with RUN where its folder is not known here."""
    has_weights = source.folder is not None and source.own_run is not None
    run = source.named if has_weights and source.named else "RUN"
    return typed(["agentloop", "replay", "rescore", run, "--where", f"id == {id!r}"])
