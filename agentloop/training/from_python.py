"""`agentloop.train`: a run from Python's own functions, rows and models."""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

with warnings.catch_warnings():
    # In a notebook without widgets, tqdm warns whoever imports it first; transformers would be the first.
    warnings.simplefilter("ignore")
    import tqdm.auto  # type: ignore[import-untyped]  # noqa: F401

from agentloop.config import RunConfig
from agentloop.config.config_file import load_plain, meant_key, to_plain
from agentloop.config.keys import KEY_OF_NAME_ELSEWHERE
from agentloop.environments.datasets import as_json
from agentloop.environments.row_environment import ROWS
from agentloop.errors import UserError, one_line, short_traceback
from agentloop.models.loading import muted_libraries
from agentloop.runs.run_folder import claim_run_folder, open_run_folder, run_to_continue
from agentloop.training.train import train as train_run
from agentloop.training.train_result import TrainResult
from agentloop.user_code import give_again, give_function, is_given
from context.wording import nearest

Function = Callable[..., Any] | str
"""A function, or its name `path/to/file.py:function`, by which other processes can call it, too."""
_SOURCE = "agentloop.train"
_FILES = {"tasks": "tasks.jsonl", "model": "given-model"}
"""File names, in the run's folder, of rows and models that were given as Python objects."""

_ARGUMENTS = ("model", "tools", "reward", "tasks", "respond", "call_tool")
_OPTIONS = ("resume", "environment_changed", "display")
"""Keywords that are no section of the configuration."""


@short_traceback
def train(
    config: RunConfig | None = None,
    /,
    *,
    model: str | Path | tuple[Any, Any] | Mapping[str, Any] | None = None,
    tools: Function | Sequence[Function] | None = None,
    reward: Function | Sequence[Any] | Mapping[str, Any] | None = None,
    tasks: str | Path | Iterable[Mapping[str, Any]] | Mapping[str, Any] | None = None,
    respond: Function | None = None,
    call_tool: Function | None = None,
    **sections: Any,
) -> TrainResult:
    """Train one run to its end, and return it.

    - `model`: a folder or hub id, a pair (model, tokenizer), of which a copy is trained, or the section `model`.
    - `tools`: functions with typed arguments and a docstring, sync or async, with `@tool(...)` or without. An argument
      of type `Task` gets the episode's task and is not shown to the policy.
    - `reward`: a function, or several, each with the ended episode and columns of its row by name; the first decides
      what a success is. Or the section `reward`, with `functions`.
    - `tasks`: rows (a list of mappings, a data set), a file or `hf:NAME`, or the section `tasks`, with `data`.
    - `respond`: a function of the task and the messages that answers a reply without calls, as a user or a game does.
      If it returns None, the reply was the answer. See `Environment.respond`.
    - `call_tool`: a function of the task, a tool's name and its arguments, for tools that a row's column `tools` gives
      as schemas.
    - Everything else is a section of the configuration: `replay={"fraction": 0.25}`, `run={"iterations": 50}`.

    With a whole `RunConfig` instead of these arguments, it calls `agentloop.training.train.train` with its options.
    `resume=True` goes on with the newest run of that name, "auto" also begins one; the functions, rows and model are
    given again, and `environment_changed=True` allows functions that have changed. `display` shows the progress.
    Functions that are objects exist only in this process: workers, `agentloop evaluate` and `--resume` need the name
    of a function's file. Raises UserError for what the user can mend, TrainingStopped when the run itself
    can't go on.
    """
    if config is not None:
        mixed: dict[str, Any] = {"model": model, "tools": tools, "reward": reward, "tasks": tasks}
        mixed |= {"respond": respond, "call_tool": call_tool}
        return train_run(config, **sections, **{name: value for name, value in mixed.items() if value is not None})
    options = {name: sections.pop(name) for name in _OPTIONS if name in sections}
    _refuse_unknown(sections)
    given = sections.pop("environment", {})
    if not (isinstance(given, Mapping) and isinstance(given.get("name", ""), str)):
        raise UserError(
            f"environment must be a section of keys whose name is text, got {given!r:.80}. Put a class into a file, "
            'and write environment={"name": "path/to/file.py:ClassName"}.'
        )
    environment = {"name": ROWS, "tools": _listed(tools), **given}
    environment["tools"] = [_function_name(function, "tools") for function in environment["tools"]]
    answers = {"respond": respond, "call_tool": call_tool}
    environment |= {name: _function_name(given, name) for name, given in answers.items() if given is not None}
    values: dict[str, Any] = {
        **sections,
        "model": _as_section(model, "path"),
        "environment": environment,
        "reward": _reward_section(() if reward is None else reward),
        "tasks": tasks_section(tasks),
    }
    _check_callers(values, sections)
    values, folder = _placed(values, resume=options.get("resume", False))
    return train_run(load_plain(values, source=_SOURCE), run=folder, **options)


def _refuse_unknown(sections: Mapping[str, Any]) -> None:
    """Raises UserError for a keyword that is no argument, no section, and no name that other libraries use."""
    for name in sorted(sections.keys() - RunConfig.model_fields.keys() - KEY_OF_NAME_ELSEWHERE.keys()):
        known = [*_ARGUMENTS, *_OPTIONS, *RunConfig.model_fields]
        close = nearest(name, known, cutoff=0.75)
        advice = f"Did you mean {close}?" if close else meant_key((name,)) or f"There is {', '.join(known)}."
        raise UserError(f"{_SOURCE}: {name} must be a known key, got an unknown one. {advice}")


def _placed(values: dict[str, Any], *, resume: bool | Literal["auto"]) -> tuple[dict[str, Any], Path | None]:
    """Write rows and models into the run's folder, so that the run does not need this process for them.

    Returns the configuration with their places, and the folder; None where nothing was written.
    """
    given = _given_contents(values)
    for section, key in given:
        values[section][key] = _FILES[section]
    asked = load_plain(values, source=_SOURCE)
    folder = run_to_continue(asked, resume=resume)
    if folder is not None:
        values = _given_again(asked, folder)
    elif given:
        folder = claim_run_folder(asked)
    for (section, key), write in given.items():
        assert folder is not None
        write(folder / _FILES[section])
        values[section][key] = str(folder / _FILES[section])
    return values, folder


def _functions(values: Mapping[str, Any]) -> list[str]:
    """The names of the tools, of `respond` and `call_tool`, and of the rewards."""
    environment = values["environment"]
    answers = [environment.get(name) or "" for name in ("respond", "call_tool")]
    return [*environment["tools"], *answers, *(row["function"] for row in values["reward"]["functions"])]


def _given_again(config: RunConfig, run: Path) -> dict[str, Any]:
    """Let the functions of a configuration stand for those of the same names that the run began with."""
    values, begun = to_plain(config), _functions(to_plain(open_run_folder(run).config))
    text = json.dumps(values)
    for spec, former in zip(_functions(values), begun, strict=False):
        if is_given(former) and spec.rpartition(":")[2] == former.rpartition(":")[2]:
            give_again(spec, begun=former)
            text = text.replace(json.dumps(spec), json.dumps(former))
    return dict(json.loads(text))


def _check_callers(values: Mapping[str, Any], sections: Mapping[str, Any]) -> None:
    """Raises UserError where workers would have to call functions of this process."""
    here = [name for name in _functions(values) if is_given(name)]
    if here and sections.get("collection", {}).get("by") == "workers":
        name = here[0].rpartition(":")[2]
        raise UserError(
            f"collection.by must be loop for functions given as objects, got workers and {name}: no worker "
            f"has it. Put it into a file, and give 'path/to/file.py:{name}'."
        )


def _given_contents(values: Mapping[str, Any]) -> dict[tuple[str, str], Callable[[Path], object]]:
    """Find the rows and models that were given as objects. Returns by key a function that writes one to a path."""
    rows, model = values["tasks"].get("data"), values["model"].get("path")
    given: dict[tuple[str, str], Callable[[Path], object]] = {}
    if rows is not None and not isinstance(rows, str):
        given["tasks", "data"] = partial(_write, "".join(json_lines(rows)))
    if model is not None and not isinstance(model, str):
        if not (isinstance(model, tuple) and len(model) == 2 and all(hasattr(m, "save_pretrained") for m in model)):
            raise UserError(
                f"model must be a folder, a hub id or a pair (model, tokenizer) of transformers, got "
                f"{type(model).__name__}. Name the folder."
            )
        given["model", "path"] = partial(_save, model)
    return given


def _write(rows: str, file: Path) -> None:
    if file.exists() and file.read_text(encoding="utf-8") != rows:
        raise UserError(f"tasks must be the rows that the run began with, got others than those of {file}. Give these.")
    file.write_text(rows, encoding="utf-8")


def _save(pair: tuple[Any, Any], folder: Path) -> None:
    """Save a copy of the model, unless the run has its own from its start."""
    with muted_libraries():
        for part in () if folder.exists() else pair:
            part.save_pretrained(folder)


def _as_section(given: Any, key: str) -> dict[str, Any]:
    """The section as a mapping; its most important key may be given alone."""
    section = dict(given) if isinstance(given, Mapping) else {} if given is None else {key: given}
    return {name: str(value) if isinstance(value, Path) else value for name, value in section.items()}


def tasks_section(given: Any) -> dict[str, Any]:
    """The section `tasks`, with rows given in any form that has one meaning."""
    if isinstance(given, Mapping) and "data" not in given and given:
        if all(hasattr(split, "column_names") for split in given.values()):
            names = ", ".join(given)
            raise UserError(f"tasks must be rows, got splits {names}. Give one: tasks=data[{next(iter(given))!r}].")
        columns = {name: column for name, column in given.items() if isinstance(column, (list, tuple))}
        if len(columns) == len(given) and len({len(column) for column in columns.values()}) == 1:
            given = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    section = _as_section(given, "data")
    if "data" in section:
        section["data"] = _as_rows(section["data"])
    return section


def _as_rows(data: Any) -> Any:
    """A table of pandas, polars or Arrow as a list of its rows, with None instead of pandas' NaN."""
    for method in ("to_pylist", "to_dicts"):
        if hasattr(data, method):
            return getattr(data, method)()
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        return [
            {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}
            for row in data.to_dict("records")
        ]
    return data


def _reward_section(given: Any) -> dict[str, Any]:
    section = dict(given) if isinstance(given, Mapping) else {"functions": given}
    functions = _listed(section.get("functions"))
    entries = [dict(entry) if isinstance(entry, Mapping) else {"function": entry} for entry in functions]
    return {
        **section,
        "functions": [{**row, "function": _function_name(row.get("function"), "reward")} for row in entries],
    }


def _listed(functions: Any) -> list[Any]:
    """A list of functions, of which one alone needs no list."""
    several = isinstance(functions, Sequence) and not isinstance(functions, str)
    return list(functions) if several else [] if functions is None else [functions]


def _function_name(function: Any, what: str) -> str:
    return function if isinstance(function, str) else give_function(function, what=what)


def json_lines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    lines = []
    for number, row in enumerate(rows, 1):
        if isinstance(row, str):
            raise UserError(f'tasks must be rows with columns, got a text in row {number}. Write {{"prompt": TEXT}}.')
        try:
            lines.append(json.dumps(dict(row), default=as_json, allow_nan=False) + "\n")
        except (TypeError, ValueError) as error:
            raise UserError(
                f"tasks must be rows of texts, finite numbers, dates and lists of them, got {one_line(error)} "
                f"in row {number}. Leave such columns out, or give None for what is not known."
            ) from error
    return lines
