"""Reads a model's tokenizer, chat template and stop tokens from its folder, or from a template alone.

The model itself is not read.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from context.authors import AuthorTable
from context.templates.chat_template import CALLED, LOOKUP, ChatTemplate, RenderError
from context.templates.render import Renderer
from context.tokens.codec import TokenCodec
from context.wording import shared_opening

BUILT_IN_TEMPLATES: Mapping[str, tuple[str, ...]] = {
    "hermes": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": (
        *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
    ),
}
"""The chat templates of this package by name, each with the control tokens that a vocabulary must have for it."""
_FOLDER = Path(__file__).parent / "built_in"
_JINJA = re.compile(r"\{[{%#]")
_SPELLED = re.compile(
    r"</?[|｜]?[^\W\d][\w▁.-]*[|｜]?>"  # <s>, </think>, <|turn>, <turn|>
    r"|<[|｜]/?[\w▁ .\"-]+[|｜]>"  # <|im_start|>, <｜User｜>, <|"|>
    r"|\[/?\w*[A-Z]{3}\w*\]|\[\|\w+\|\]"  # [INST], [gMASK], [|endofturn|]
)
_FALLBACK_SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
_Row = Mapping[str, Any]
_SAID, _THOUGHT = "pearl-0417", "coral-0815"
_ASKED: _Row = {"role": "user", "content": "x"}


@dataclass(frozen=True)
class ModelFiles:
    codec: TokenCodec
    template: ChatTemplate
    stop_ids: frozenset[int]
    """The tokens that end a reply: eos, and those with which the template ends an answer or a turn of tool calls."""

    def renderer(
        self, authors: AuthorTable, stop_strings: tuple[str, ...] = (), *, allow_hidden: bool = False
    ) -> Renderer:
        """`stop_strings`: texts that end a reply as a stop token does. `allow_hidden`: see `Renderer`."""
        return Renderer(
            self.codec,
            self.template,
            authors=authors,
            stop_ids=self.stop_ids,
            stop_strings=stop_strings,
            allow_hidden=allow_hidden,
        )


def load_model_files(
    path: Path | str, *, template: str | None = None, template_args: Mapping[str, Any] | None = None
) -> ModelFiles:
    """Reads a folder with tokenizer.json and a chat template, or a .jinja file.

    A .jinja file alone gets a tokenizer that is trained on its text, with every control token in the text. `template`
    replaces the folder's template: the name of a built-in one, a path or a text. `template_args` are further variables
    of the template, such as enable_thinking. Raises RenderError if there is no such model or template.
    """
    path = Path(path).expanduser()
    if path.suffix == ".jinja" and path.is_file() and template is None:
        return from_template(_read(path), template_args=template_args)
    if not path.is_dir():
        raise RenderError(
            f"MODEL_OR_TEMPLATE must be a model folder or a .jinja file, got {str(path)!r}. Check the path; a model of "
            "the hub is downloaded by: hf download ID --include '*.json' '*.jinja' --local-dir FOLDER"
        )
    return _from_folder(path, template, template_args)


def from_template(source: str, *, template_args: Mapping[str, Any] | None = None) -> ModelFiles:
    """A template with a byte-level tokenizer that is made for it. It shows the template's doing, for no real model."""
    template = ChatTemplate(source, _FALLBACK_SPECIALS, args=template_args)
    codec = TokenCodec(train_tokenizer(source.splitlines(), spelled_controls(source)).to_str())
    return ModelFiles(codec, template, stop_ids_of(codec, template, _FALLBACK_SPECIALS["eos_token"]))


def spelled_controls(source: str) -> list[str]:
    """The texts in a template that look like control tokens, and the fallback bos and eos."""
    return list(dict.fromkeys([*_FALLBACK_SPECIALS.values(), *_SPELLED.findall(source)]))


def train_tokenizer(
    corpus: Iterable[str],
    added: Sequence[str],
    *,
    vocab_size: int = 600,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None,
) -> Tokenizer:
    """A byte-level BPE of `vocab_size` entries, and the `added` control tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size + len(added),
        special_tokens=[AddedToken(token, normalized=False) for token in added],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def template_source(given: str) -> str:
    """Return the text of a template, given the name of a built-in one, the path of a .jinja file, or the text.

    Raises RenderError for any other value.
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
    """The text of a template for a vocabulary.

    Raises RenderError where the control tokens of a built-in template are only text for the vocabulary.
    """
    missing = [token for token in BUILT_IN_TEMPLATES.get(given, ()) if token not in codec.added_tokens]
    if missing:
        raise RenderError(
            f"context.template must be one for the model's vocabulary, got {given} for one without "
            f"{', '.join(missing)}. Set context.template: {templates_for(codec)}."
        )
    return template_source(given)


def templates_for(codec: TokenCodec) -> str:
    """Name the templates that fit a vocabulary: built-in ones whose control tokens it has, or one of the user's own."""
    known = set(codec.added_tokens)
    fitting = [name for name, controls in BUILT_IN_TEMPLATES.items() if known.issuperset(controls)]
    return " or ".join([*fitting, "a .jinja file of your own"])


def stop_tokens(template: ChatTemplate, codec: TokenCodec, declared: Collection[int] = ()) -> frozenset[int]:
    """The tokens that end an answer and a turn of calls, found by rendering.

    `declared`: eos, and the tokens that the model's files list.
    """
    answer = {"role": "assistant", "content": _SAID}
    thoughtful = [_ASKED, {**answer, "reasoning_content": _THOUGHT}]
    # The text between a thought and the answer closes the thought: a turn may be several closed messages.
    thought = _rendered(template, thoughtful, prompted=False, tools=False).partition(_THOUGHT)[2].partition(_SAID)[0]
    found = _reply_end(template, codec, answer, _ASKED, wanted=[declared])
    found = [token for token in found if token not in codec.encode(thought)]
    # The text between two calls of one turn belongs to a call, and does not end the turn.
    between = _rendered(template, [_ASKED, _calling(2)], prompted=False, tools=True).split(_SAID)[1:-1]
    inside = set(codec.encode("".join(between)))
    return frozenset(
        [*found, *_reply_end(template, codec, _calling(1), CALLED[2], wanted=[declared, found], inside=inside)]
    )


def _reply_end(
    template: ChatTemplate,
    codec: TokenCodec,
    reply: _Row,
    following: _Row,
    *,
    wanted: Sequence[Collection[int]],
    inside: Collection[int] | None = None,
) -> list[int]:
    """The token that ends a reply, in a list of at most one token.

    `following` is the message after the reply. `wanted` are tokens to prefer if several follow the reply, the surest
    first. `inside` are control tokens within a turn of calls, which do not end the turn; None: the reply is an answer.
    """
    rows, calls = [_ASKED, reply], inside is not None
    last, prompted = (_rendered(template, rows, prompted=prompted, tools=calls) for prompted in (False, True))

    def controls(text: str) -> list[int]:
        return [token for token in codec.encode(text) if token in codec.added_ids.difference(inside or ())]

    behind = [text.rpartition(_SAID)[2] for text in (last, prompted)]
    ends = controls(shared_opening(*behind)) or controls(behind[0])
    for tokens in wanted:
        if (token := next((token for token in ends if token in tokens), None)) is not None:
            return [token]
    if ends:  # a template may write a generation prompt that nobody asked for
        return [ends[0 if last == prompted else -1]]
    return controls(_rendered(template, [*rows, following], prompted=True, tools=calls).partition(_SAID)[2])[:1]


def _calling(count: int) -> _Row:
    function = {"name": "lookup", "arguments": {"key": _SAID}}
    calls = [{"type": "function", "id": f"call0000{number}", "function": function} for number in range(1, count + 1)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _rendered(template: ChatTemplate, rows: Sequence[_Row], *, prompted: bool, tools: bool) -> str:
    """The rendering of these rows. Empty: the template refuses them."""
    for schemas in ((LOOKUP,), ()) if tools else ((),):
        try:
            return template.render(rows, tools=schemas, generation_prompt=prompted)
        except RenderError:
            continue
    return ""


def _from_folder(folder: Path, template: str | None, template_args: Mapping[str, Any] | None) -> ModelFiles:
    config = _json(folder / "tokenizer_config.json")
    named = {name: _text(value) for name, value in config.items() if name.endswith("_token")}
    special = {name: text for name, text in named.items() if text is not None}
    codec = _codec(folder, special)
    own = _templates(folder, config) if template is None else {"default": source_for(template, codec)}
    chosen = named_template(own, special, template_args)
    if chosen is None:
        raise RenderError(
            f"model folder must hold a chat template, got none in {str(folder)!r}. "
            "Use an instruction-tuned model, or set context.template."
        )
    listed = _json(folder / "generation_config.json").get("eos_token_id")
    return ModelFiles(codec, chosen, stop_ids_of(codec, chosen, special.get("eos_token", ""), listed))


def named_controls(special: Mapping[str, str]) -> frozenset[str]:
    """The named tokens of a tokenizer (eos_token, pad_token, ...) that are never plain text."""
    return frozenset(text for name, text in special.items() if name != "unk_token")


def named_template(
    named: Mapping[str, Any], special_tokens: Mapping[str, str], args: Mapping[str, Any] | None
) -> ChatTemplate | None:
    """The template that transformers chooses from a model's named sources. None: the sources have no default."""
    default, tool_use = named.get("default"), named.get("tool_use")
    if not isinstance(default, str) or not default:
        return None
    for_tools = tool_use if isinstance(tool_use, str) and tool_use else None
    return ChatTemplate(default, special_tokens, tool_use=for_tools, args=args)


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The folder's templates by name. Files go before the configuration, as in transformers."""
    written = config.get("chat_template")
    rows = written if isinstance(written, list) else [{"name": "default", "template": written}]
    named = {str(row.get("name")): row.get("template") for row in rows if isinstance(row, dict)}
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if (source := folder / "chat_template.jinja").is_file():
        named = {"default": _read(source)}
    return named | {path.stem: _read(path) for path in more}


def _codec(folder: Path, special: Mapping[str, str]) -> TokenCodec:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise RenderError(
            f"model folder must hold tokenizer.json, got none in {str(folder)!r}. Copy it from the model, or make it "
            "with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
        )
    text = _read(path)
    try:
        # Written by the library, so that the hash does not depend on how the file is laid out.
        return TokenCodec(Tokenizer.from_str(text).to_str(), special=named_controls(special))
    except Exception as error:  # noqa: BLE001 (what the tokenizers package raises has no other class)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        raise RenderError(
            f"tokenizer.json must be a tokenizer in the Hugging Face format, got {str(path)!r} ({reason}). "
            "Copy it from the model again."
        ) from None


def stop_ids_of(codec: TokenCodec, template: ChatTemplate, eos: str, listed: Any = None) -> frozenset[int]:
    """The tokens that end a reply: from the generation's configuration, eos, and the template's own.

    The template adds no token if it already ends a reply with one of the others.
    """
    known = [i for i in (listed if isinstance(listed, list) else [listed]) if type(i) is int and i >= 0]
    end = codec.token_id(eos)
    declared = frozenset([*known, *([] if end is None else [end])])
    written = stop_tokens(template, codec, declared)
    stop_ids = declared if written & {*known} else declared | written
    if not stop_ids:
        raise RenderError(
            "model must name an end-of-turn token, got none in its tokenizer or template. Name an eos_token in "
            "tokenizer_config.json."
        )
    return stop_ids


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RenderError(f"{path.name} must be a text file in UTF-8, got {str(path)!r} ({error}).") from None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise RenderError(f"{path.name} must be JSON, got: {error}. Mend the file.") from None
    return value if isinstance(value, dict) else {}


def _text(token: Any) -> str | None:
    """A special token as a text. Files have the text, or an object with it."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None
