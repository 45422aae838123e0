"""What errors, notes and help texts advise can be done: commands and options are there, settings take these values."""

import ast
import re
from functools import cache
from typing import Any

import pytest
import typer
from typer._click.exceptions import MissingParameter, UsageError

from agentloop.cli.main import LateCommand, app
from agentloop.config import RunConfig
from agentloop.config.config_file import load_plain
from agentloop.config.keys import KEY_OF_NAME_ELSEWHERE, Key, schema_entries
from agentloop.errors import UserError
from agentloop.runs.run_folder import iteration_settings
from tests.docs.blocks import tables
from tests.docs.test_errors_page import PAGE, fits, nodes, text

NO_COMMANDS = {"must", "at", "that", "<>"}
"""Words behind the name of the program in sentences about it."""
OPTIONS_OF_OTHERS = {
    *("--dtype", "--max-model-len", "--enable-lora", "--api-key", "--enable-scale-out", "--logprobs-mode"),
    *("--tensor-parallel-size", "--nproc-per-node", "--repo-type", "--local-dir", "--include"),
}
"""Options of vLLM, torchrun and hf."""
SECTIONS = "|".join(path[0] for path in schema_entries() if len(path) == 1)
SETTING = re.compile(
    rf"(?<![\w./:-])((?:{SECTIONS})(?:\.[a-z_]+)+)(?!\.?\w)(?:(?:: |=)(\[[^\]]*\]|\{{[^}}]*\}}|[\w<>./+-]+))?"
)
NO_SETTINGS = ("metrics.jsonl", "model.generate", "run.json")
"""A method, and files, whose names look like a setting."""


@cache
def texts() -> dict[str, str]:
    """All texts but docstrings, by file and line."""
    skipped = {id(node.value) for _, node in nodes() if isinstance(node, ast.Expr)}
    skipped |= {id(part) for _, node in nodes() if isinstance(node, ast.JoinedStr) for part in [*ast.walk(node)][1:]}
    found = {}
    for path, node in nodes():
        if id(node) not in skipped and (said := text(node)) is not None and " " in said:
            found[f"{path.name}:{getattr(node, 'lineno', 0)}: {said}"] = said
    return found


@cache
def commands() -> dict[tuple[str, ...], Any]:
    """Every command of the program by its words."""
    found: dict[tuple[str, ...], Any] = {}
    waiting: list[tuple[tuple[str, ...], Any]] = [((), typer.main.get_command(app))]
    while waiting:
        words, command = waiting.pop()
        found[words] = command = command.loaded() if isinstance(command, LateCommand) else command
        waiting += [((*words, name), each) for name, each in getattr(command, "commands", {}).items()]
    return found


def problem_of(said: str) -> str | None:
    """Why a command line, with the sentence behind it, can't be typed; None if it can."""
    words = [word.rstrip(".,:;)").strip("\"'") for word in re.findall(r"\"[^\"]*\"|'[^']*'|[^\s`]+", said)]
    name = tuple(words[: max(size for size in range(3) if tuple(words[:size]) in commands())])
    if not name:
        return None if words[0] in NO_COMMANDS else "no such command"
    command, given = commands()[name], list[str]()
    takes_value = {
        option: not getattr(p, "is_flag", False) for p in command.params for option in (*p.opts, *p.secondary_opts)
    }
    left = iter(words[len(name) :])
    for word in left:
        if word.startswith("--") and word != "--":
            given += [word, *([next(left)] if takes_value.get(word) and word != "--resume" else [])]
        elif re.search(r"^[A-Z]+$|[/<\d]", word):
            given.append(word)
        else:
            break
    try:
        command.make_context(name[-1], [*given], resilient_parsing=False)
    except MissingParameter:
        return None  # the command alone is named
    except UsageError as error:
        return error.format_message()
    return None


def test_commands_that_texts_advise_can_be_typed() -> None:
    lines = [(place, line) for place, said in texts().items() for line in re.split(r"(?<![\w./-])agentloop ", said)[1:]]
    assert len(lines) > 70
    assert {f"{place}: {problem}" for place, line in lines if line and (problem := problem_of(line))} == set()


def test_options_that_texts_name_are_there() -> None:
    params = [param for command in commands().values() for param in command.params]
    known = {option for param in params for option in (*param.opts, *param.secondary_opts)}
    named = {option for said in texts().values() for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", said)}
    assert len(named) > 40
    assert named - known - OPTIONS_OF_OTHERS == set()


def settings() -> list[tuple[str, str, str | None]]:
    """Each setting that a text names, with its place and the value that is advised for it, if any."""
    found = [(place, *match.groups()) for place, said in texts().items() for match in SETTING.finditer(said)]
    return [one for one in found if not one[1].startswith(NO_SETTINGS)]


def test_settings_that_texts_name_are_keys() -> None:
    paths = {".".join(path): entry for path, entry in schema_entries().items()}
    free = tuple(f"{name}." for name, entry in paths.items() if isinstance(entry, Key) and entry.free)
    known = {*paths, *KEY_OF_NAME_ELSEWHERE}
    assert len(settings()) > 300
    assert {place for place, key, _ in settings() if key not in known and not key.startswith(free)} == set()


def test_values_that_texts_advise_are_allowed() -> None:
    tried, wrong = 0, set()
    for place, key, value in settings():
        is_advice = re.search(rf"(Set|set|--set|or|to|Use|with|\() {re.escape(key)}(: |=)", place)
        if value is None or "<" in value or not is_advice:
            continue
        tried += 1
        try:
            load_plain({}, [f"{key}={value.rstrip('.')}".replace("=NUMBER", "=9")], source="advice")
        except UserError as error:  # other rules depend on other settings
            if " It is: " in str(error) or "known key" in str(error):
                wrong.add(f"{place}: {error}")
    assert (wrong, tried > 30) == (set(), True)


def stopping() -> dict[str, str]:
    """Messages that stop a run in its middle, by place: those of the page's tables about that."""
    heads = ("the run's own engine", "behavior_log_probs of", "batch.micro_batch_tokens must", "... Then go on")
    of_runs = [rows for rows in tables(PAGE) if "message" in rows[0] and any(head in str(rows) for head in heads)]
    messages = [message for rows in of_runs for row in rows for message in re.findall("`([^`]+)`", row["message"])]
    cells = [re.sub(r"\.\.\.|\bNAME\b", "<>", message) for message in messages]
    return {place: said for place, said in texts().items() if any(fits(cell, said) for cell in cells)}


@pytest.mark.parametrize("place", sorted(stopping()))
def test_setting_that_a_stopped_run_is_advised_may_change_on_resume(place: str) -> None:
    advice = stopping()[place].split(", got ")[-1].partition(". ")[2].partition("a new run can")[0]
    fixed = iteration_settings(RunConfig())
    assert [key for key, _ in SETTING.findall(advice) if key in fixed] == []
