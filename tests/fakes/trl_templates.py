"""The chat templates of the installed `trl`, each with a byte-level tokenizer that spells its control tokens."""

from __future__ import annotations

from functools import cache

import pytest

from context import Author, AuthorTable, Renderer, default_authors
from context.templates.model_files import ModelFiles, from_template
from context.templates.template_report import check_template
from tests.fakes.real_templates import real_template

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
MAIN = [
    *("cohere", "deepseekv3", "gemma", "gemma4_v5", "glm4moe", "gptoss", "lfm2", "lfm2_v2", "llama3", "llama3_1"),
    *("llama3_2", "muse_glimmer", "nemotron_3_nano", "phi3", "qwen2_5", "qwen3", "qwen3_5_think"),
]
"""A template per family and generation: the ones the long tests run over."""
SIX = ["deepseekv3", "gemma4_v5", "gptoss", "llama3_1", "phi3", "qwen3"]
TEMPLATES = [*SIX, *(pytest.param(name, marks=pytest.mark.soak) for name in MAIN if name not in SIX)]
"""Six by default, all of `MAIN` in `make soak`."""

SPEAKERS = (
    Author("human_edit", action=True, trained=True, behavior=False),
    Author("subagent:planner", action=True, trained=False, behavior=False),
    Author("judge", action=False, trained=False),
)
"""Registered authors: a trained and an untrained one that speak in the policy's place, and one that looks on."""
AUTHORS = AuthorTable([*default_authors().authors, *SPEAKERS])


@cache
def model(name: str) -> ModelFiles:
    return from_template(real_template(f"trl/{name}").text)


@cache
def renderer(name: str) -> Renderer:
    files = model(name)
    return Renderer(files.codec, files.template, authors=AUTHORS, stop_ids=files.stop_ids)


@cache
def shapes(name: str) -> tuple[bool, bool]:
    """Whether a template takes system messages, and tool calls with their results."""
    cases = {case.name: case for case in check_template(model(name)).cases}
    results = cases["tool results, then a user"]
    takes_calls = results.state != "unsupported" and not any("shown again" in detail for detail in results.details)
    return cases["system message"].state != "unsupported", takes_calls
