"""docs/errors.md lists what the code can answer with, and nothing else."""

import ast
import re
import signal
from functools import cache
from pathlib import Path

from agentloop.engines.remote.vllm_protocol import FaultKind
from agentloop.runs.signals import StopRequest
from context.strategies import protocol
from replay.records import STATES, StopReason
from tests.docs.blocks import ROOT, table, tables

PAGE = ROOT / "docs" / "errors.md"
PACKAGES = ("agentloop", "replay", "context")
LISTED = frozenset(
    {"TrainingStopped", "RankLost", "GenerationFailed", "RunReplaced", "DatabaseRefused", "DatabaseFailed"}
    | {"ConnectionLost", "BlobError", "BadRow", "ExchangeError"}
)
"""Each message of these has a row; of others, those that a class has itself, and those that speak of `--resume`."""
LIBRARY = ("Exception", "BaseException", "SystemExit", "ValueError", "RuntimeError")


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """Everything in the packages' modules, each with its file."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [(path, node) for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def text(node: ast.AST) -> str | None:
    """A string with `<>` for each value in it; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "<>" for part in node.values)
    return None


def raised() -> set[str]:
    """The texts that the listed errors are made with, and those of any error that say how to resume."""
    found = set()
    for path, node in nodes():
        if isinstance(node, ast.Call) and node.args and (message := text(node.args[0])):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            is_own = name == "__init__" and " must " in message  # what an error class says of itself
            if name in LISTED or is_own or (name.endswith("Error") and "--resume" in message):
                found.add(message)
        elif isinstance(node, ast.Return) and path == ROOT / "agentloop/engines/generator.py":
            found |= {message} if node.value is not None and (message := text(node.value)) else set()
    return {message for message in found if re.search("[a-z]{3}", message)}


def cells() -> list[str]:
    """Messages and reasons of the page, with `<>` for what differs."""
    rows = [row for found in tables(PAGE) for row in found if {"message", "reason"} & row.keys()]
    codes = [re.findall("`([^`]+)`", row.get("message", row.get("reason", ""))) for row in rows]
    assert all(codes)
    return [re.sub(r"\.\.\.|\bNAME\b", "<>", code) for row in codes for code in row]


def fits(cell: str, message: str) -> bool:
    """Whether a message begins so; of one that begins with a value the rest may stand anywhere."""
    rest = cell.removeprefix("<>").strip()
    return message.startswith(cell) or (cell.startswith("<>") and message.startswith("<>") and rest in message)


def names(column: str) -> list[str]:
    return [name for row in table(PAGE, column) for name in re.findall("`([^`]+)`", row[column])]


def constants(*paths: str) -> set[str]:
    """Values of the public constants of modules that hold words."""
    found = set()
    for path in paths:
        for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                value = text(node.value)
                if re.fullmatch("[A-Z][A-Z_]+", node.targets[0].id) and value and re.fullmatch("[a-z_]+", value):
                    found.add(value)
    return found


def error_classes() -> set[str]:
    """Public exceptions of the packages; those of its pages are answers of a server."""
    classes = [
        (node.name, {base.id for base in node.bases if isinstance(base, ast.Name)})
        for path, node in nodes()
        if isinstance(node, ast.ClassDef) and "pages" not in path.parts
    ]
    found: set[str] = set()
    while True:
        more = {name for name, bases in classes if bases & ({*LIBRARY} | found)}
        if more == found:
            return {name for name in found if not name.startswith("_")}
        found = more


def exit_codes() -> set[int]:
    """Numbers that commands end with, and those of the signals that a run answers."""
    ends = {"exit", "Exit", "SystemExit"}
    found = {0}
    for _, node in nodes():
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ends:
            inner = [each for argument in node.args for each in ast.walk(argument) if isinstance(each, ast.Constant)]
            found |= {each.value for each in inner if type(each.value) is int} - {128}  # what signals are added to
    return found | {StopRequest(number).exit_code for number in (signal.SIGINT, signal.SIGTERM)}


def test_every_stop_reason_error_kind_engine_fault_state_exit_code_and_error_class_has_a_row() -> None:
    own = {value for name, value in vars(protocol).items() if name.isupper() and isinstance(value, str)}
    assert sorted(names("stop reason")) == sorted({*map(str, StopReason), *own})
    tools = [str(path.relative_to(ROOT)) for path in (ROOT / "agentloop/environments/tools").glob("*.py")]
    assert sorted(names("error kind")) == sorted(constants("agentloop/rollouts/episodes/episode.py", *tools))
    assert sorted(names("engine fault")) == sorted(FaultKind)
    assert [row["state"].strip("`") for row in table(PAGE, "state")] == list(STATES)
    assert {int(row["exit code"]) for row in table(PAGE, "exit code")} == exit_codes()
    assert sorted(re.findall(r"`(\w+)`", " ".join(r["class"] for r in table(PAGE, "class")))) == sorted(error_classes())


def test_every_message_that_ends_something_has_a_row() -> None:
    messages, listed = raised(), cells()
    assert len(messages) > 90
    assert [message for message in sorted(messages) if not any(fits(cell, message) for cell in listed)] == []


def test_no_row_names_a_message_that_does_not_exist() -> None:
    messages = {found for _, node in nodes() if (found := text(node)) is not None}
    assert [cell for cell in cells() if not any(fits(cell, message) for message in messages)] == []
