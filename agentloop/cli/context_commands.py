"""`agentloop context check`: a report on a chat template."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from agentloop.cli.options import AsJson, command_group
from context.parse import PARSERS
from context.templates.chat_template import RenderError
from context.templates.model_files import BUILT_IN_TEMPLATES, load_model_files, templates_for
from context.templates.template_report import TemplateReport, check_template

app = command_group(help="Look at chat templates.", epilog="Example: agentloop context check template.jinja")


@app.callback()
def context() -> None:
    """Make `check` a command of its own: Typer would merge an app's only command into the app."""


@app.command(epilog="Example: agentloop context check runs/quickstart-001/model")
def check(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL_OR_TEMPLATE",
            help="Model folder (tokenizer.json and a chat template), or a .jinja file.",
        ),
    ],
    template: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=f"In place of the model's own: {', '.join(BUILT_IN_TEMPLATES)}, or a .jinja file.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What a chat template does to a growing conversation, case by case. Exit code 1 if no run with tools takes it."""
    try:
        files = load_model_files(model, template=template)
        report = check_template(files)
        usable = report.parser in PARSERS and not (report.parts["tools"] or report.parts["results"])
    except ValueError as error:  # an unsafe tokenizer
        raise RenderError(str(error)) from None
    if as_json:
        print(json.dumps({"state": report.state, "works_with_tools": usable, **asdict(report)}))
    else:
        print(_report_text(report))
        if not usable:
            print(f"not usable with tools: set context.template: {templates_for(files.codec)} (for this vocabulary)")
    raise typer.Exit(0 if usable else 1)


def _report_text(report: TemplateReport) -> str:
    width = max(len(case.name) for case in report.cases)
    lines: list[str] = []
    for case in report.cases:
        lines.append(f"{case.name:<{width}}  {case.state}")
        details = (f"{'':<{width}}    {detail}" for detail in case.details)
        lines += [detail for detail in details if detail not in lines]  # a detail of several cases is shown once
    unsupported = sum(case.state == "unsupported" for case in report.cases)
    rest = f"; {unsupported} of {len(report.cases)} cases unsupported" if unsupported else ""
    lines.append(f"\nverdict: {report.state}{rest}")
    if report.state == "append-only":
        lines.append("what was shown once stays as it is: an episode is one training sequence")
    if report.state == "rewrites history":
        lines.append("what a template rewrites is trained as the policy saw it, in a segment of its own")
    lines.append(f"context.parser: auto {'takes' if report.parser in PARSERS else 'is refused:'} {report.parser}")
    lines += [f"{part}: {'shown' if why is None else f'left out: {why}'}" for part, why in report.parts.items()]
    return "\n".join(lines)
