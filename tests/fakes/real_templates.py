"""Chat templates of published models: from the files of installed packages, which are never imported, and short ones
written here after the models' documentation, where no package has the family.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PACKAGES = {"trl": "chat_templates", "axolotl": "utils/chat_templates/templates"}
WRITTEN_HERE = Path(__file__).parent / "templates"
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
_COHERE = SPECIAL_TOKENS | {"eos_token": "<|END_OF_TURN_TOKEN|>"}
_NAMED = {"axolotl/command_a": _COHERE, "axolotl/command_a_rag": _COHERE, "axolotl/command_a_tool_use": _COHERE}
"""Where the model's own names of special tokens matter: the template writes a header behind every end of turn."""
SIX = (*("trl/llama3_1", "trl/qwen3", "trl/deepseekv3", "trl/gemma4_v5", "trl/gptoss", "written/mistral_v0_3"),)
"""What tests go through by default, with these kinds of tokenizers; `make soak` goes through all."""
KINDS = ("byte_bpe", "sp_legacy")
REPRESENTATIVE = (
    *SIX,
    *("trl/phi3", "axolotl/chatml", "axolotl/mistral_v2v3", "written/chatglm2", "written/glm_4_6", "written/llama_2"),
)
"""What every kind of tokenizer is tried with."""
_SOURCE = re.compile(r"\{#- Source: (.*?[.:,] )", re.DOTALL)


@dataclass(frozen=True)
class RealTemplate:
    name: str
    """The package and the file's own name."""
    source: str
    """The distribution it comes with, or the documentation it was written after."""
    text: str
    special_tokens: Mapping[str, str] = field(default_factory=lambda: dict(SPECIAL_TOKENS))
    """What the template is given by name, as `tokenizer_config.json` has it."""


@cache
def real_templates() -> tuple[RealTemplate, ...]:
    """All of them, in a fixed order: none patched for training, no text twice."""
    found: dict[str, RealTemplate] = {}
    for template in (*_packaged(), *_written()):
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
                yield RealTemplate(name, package, text, _NAMED.get(name, SPECIAL_TOKENS))


def _written() -> Iterator[RealTemplate]:
    for path in sorted(WRITTEN_HERE.glob("*.jinja")):
        text = path.read_text(encoding="utf-8").removesuffix("\n")
        named = _SOURCE.match(text)
        assert named is not None, f"{path.name} must name its source in its first line"
        yield RealTemplate(f"written/{path.stem}", named[1].rstrip(".:, "), text)
