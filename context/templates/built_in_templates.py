"""The chat templates that come with agentloop, and others by a file's path: for models whose own shows no tools."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from context.templates.chat_template import RenderError
from context.tokens.codec import TokenCodec

BUILT_IN_TEMPLATES: Mapping[str, tuple[str, ...]] = {
    "hermes": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": (
        *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
    ),
}
"""By name: the control tokens that a vocabulary must have for it."""
_FOLDER = Path(__file__).parent / "built_in"
_JINJA = re.compile(r"\{[{%#]")


def template_source(given: str) -> str:
    """The text of a template: a built-in one by its name, a .jinja file by its path, or the text itself.

    Raises RenderError for what is none of them.
    """
    if _JINJA.search(given):
        return given
    path = _FOLDER / f"{given}.jinja" if given in BUILT_IN_TEMPLATES else Path(given).expanduser()
    try:
        found = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        found = ""
    if not _JINJA.search(found):
        raise RenderError(
            f"context.template must be one of {', '.join(BUILT_IN_TEMPLATES)}, or the path of a readable .jinja file, "
            f"got {given!r}. Check the name or the path."
        )
    return found


def source_for(given: str, codec: TokenCodec) -> str:
    """The text of a template for a vocabulary: RenderError also where a built-in one's control tokens are only text."""
    known = set(codec.added_tokens)
    missing = [token for token in BUILT_IN_TEMPLATES.get(given, ()) if token not in known]
    if missing:
        fitting = [name for name, controls in BUILT_IN_TEMPLATES.items() if known.issuperset(controls)]
        raise RenderError(
            f"context.template must be one for the model's vocabulary, got {given} for one without "
            f"{', '.join(missing)}. Set context.template: {' or '.join([*fitting, 'a .jinja file of your own'])}."
        )
    return template_source(given)
