"""`agentloop context ...`: what a chat template does, and what a conversation looks like in tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from agentloop.cli.options import AsJson
from context.authors import default_authors
from context.conversation_file import read_conversation
from context.templates.chat_template import RenderError
from context.templates.model_files import BUILT_IN_TEMPLATES, load_model_files
from context.templates.template_report import TemplateReport, check_template, in_words
from context.view import token_view
from replay.locate import newest_run_folder, start_folder

app = typer.Typer(
    help="Look at chat templates and conversations, token by token.",
    epilog="Example: agentloop context check template.jinja",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
TemplateArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--template-arg",
        metavar="NAME=VALUE",
        help="A further variable of the template, as JSON or else as text: enable_thinking=false. Can be repeated.",
    ),
]
Template = Annotated[
    str | None,
    typer.Option(
        "--template",
        metavar="NAME|FILE",
        help=f"In place of the model's own, as context.template: {', '.join(BUILT_IN_TEMPLATES)}, or a .jinja file.",
    ),
]


@app.command(epilog="Example: agentloop context check runs/quickstart-001/model")
def check(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL_OR_TEMPLATE",
            help="Model folder (tokenizer.json and a chat template), or a .jinja file.",
        ),
    ],
    template: Template = None,
    template_arg: TemplateArgs = None,
    as_json: AsJson = False,
) -> None:
    """What a chat template does to a growing conversation, case by case. Exit code 1 if it can do none."""
    with _refused():
        report = check_template(load_model_files(model, template=template, template_args=_named(template_arg)))
    if as_json:
        print(json.dumps({"state": report.state, **asdict(report)}))
    else:
        print(_report_text(report))
    raise typer.Exit(1 if report.state == "unsupported" else 0)


@app.command(epilog="Example: agentloop context show chat.json --model runs/quickstart-001/model")
def show(
    file: Annotated[Path, typer.Argument(help="JSON file of messages. A stored trajectory: agentloop replay show ID.")],
    model: Annotated[
        Path | None,
        typer.Option(metavar="MODEL_OR_TEMPLATE", help="What renders it; the model of the newest run when left out."),
    ] = None,
    template: Template = None,
    template_arg: TemplateArgs = None,
    as_json: AsJson = False,
) -> None:
    """A conversation as tokens coloured by author, with masks."""
    if not file.is_file():
        raise RenderError(f"FILE must be a JSON file of messages, got {str(file)!r}, which is none.")
    folder = model or start_folder(newest_run_folder())
    authors = default_authors()
    with _refused():
        found = load_model_files(folder, template=template, template_args=_named(template_arg))
        tokens = found.renderer(authors).initial(*read_conversation(file))
    if as_json:
        names = [authors.name(code) for code in tokens.authors.tolist()]
        print(json.dumps({"token_ids": tokens.token_ids.tolist(), "authors": names}))
    else:
        Console(highlight=False, soft_wrap=True).print(token_view(tokens, authors, found.codec))


def _named(given: list[str] | None) -> dict[str, Any]:
    """The values of `--template-arg`; what is no JSON is text."""
    values: dict[str, Any] = {}
    for pair in given or ():
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise RenderError(f"--template-arg must be NAME=VALUE, got {pair!r}. Write, for example, date=today.")
        try:
            values[name] = json.loads(text)
        except (ValueError, RecursionError):
            values[name] = text
    return values


@contextmanager
def _refused() -> Iterator[None]:
    """What the file says is the user's to mend: names, authors, a tokenizer that is not safe."""
    try:
        yield
    except ValueError as error:
        raise RenderError(str(error)) from None


def _report_text(report: TemplateReport) -> str:
    width = max(len(case.name) for case in report.cases)
    lines = []
    for case in report.cases:
        lines.append(f"{case.name:<{width}}  {in_words(case.state)}")
        lines += [f"{'':<{width}}    {detail}" for detail in case.details]
    unsupported = sum(case.state == "unsupported" for case in report.cases)
    rest = f"; {unsupported} of {len(report.cases)} cases unsupported" if unsupported else ""
    lines.append(f"\nverdict: {in_words(report.state)}{rest}")
    if report.state == "rewrites_history":
        lines.append("what a template rewrites is trained as the policy saw it, in a segment of its own")
    lines.append(f"calls are read by: {report.parser}")
    lines += [f"left out: {sentence}" for sentence in report.hidden]
    return "\n".join(lines)
