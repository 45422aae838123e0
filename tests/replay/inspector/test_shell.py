from __future__ import annotations

import shlex

import pytest
from replay.inspector.text.reading import typed


@pytest.mark.parametrize(
    "word",
    [
        "plain",
        "'answer' in text",
        "a \"b\" 'c'",
        "'$HOME'",
        "'`id`'",
        "it's \\ here",
        "'!x'",
        "'\n'",
        "",
        "ü ' 日",
    ],
)
def test_a_shell_reads_what_was_meant(word: str) -> None:
    assert shlex.split(typed(["ls", word])) == ["ls", word]


def test_filters_are_typed_between_double_quotes() -> None:
    assert typed(["ls", "--where", "tool == 'lookup'"]) == "ls --where \"tool == 'lookup'\""


def test_what_a_shell_would_replace_is_not() -> None:
    assert typed(["'$HOME'"]) == "''\"'\"'$HOME'\"'\"''"
