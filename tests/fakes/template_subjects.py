"""A template with a tokenizer, as `context` loads a model's folder and as transformers has it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from context import Renderer, default_authors
from context.templates.model_files import load_model_files
from tests.fakes.real_templates import RealTemplate
from tests.fakes.template_reference import Reference
from tests.fakes.tokenizer_kinds import lossless, tokenizer_kinds


@dataclass
class Subject:
    template: RealTemplate
    kind: str
    renderer: Renderer
    reference: Reference
    lossless: bool


def subject(template: RealTemplate, kind: str) -> Subject:
    tokenizer_json = tokenizer_kinds()[kind](template.text)
    with TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
        (path / "tokenizer_config.json").write_text(json.dumps(dict(template.special_tokens)), encoding="utf-8")
        (path / "chat_template.jinja").write_text(template.text, encoding="utf-8")
        renderer = load_model_files(path).renderer(default_authors(), allow_hidden=True)
    return Subject(template, kind, renderer, Reference(template, tokenizer_json), lossless(kind))
