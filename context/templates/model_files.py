"""A model's tokenizer and chat template from its folder, without the model; or from a template alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from context.authors import AuthorTable
from context.templates.chat_template import ChatTemplate, RenderError
from context.templates.render import Renderer
from context.templates.template_probe import conversation, mark
from context.tokens.codec import TokenCodec

_SPELLED = re.compile(
    r"</?[|｜]?[^\W\d][\w▁.-]*[|｜]?>"  # <s>, </think>, <|turn>, <turn|>
    r"|<[|｜]/?[\w▁ .\"-]+[|｜]>"  # <|im_start|>, <｜User｜>, <|"|>
    r"|\[/?\w*[A-Z]{3}\w*\]"  # [INST], [gMASK]
)
_FALLBACK_SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}


@dataclass(frozen=True)
class ModelFiles:
    """What `context` needs of a model."""

    codec: TokenCodec
    template: ChatTemplate
    stop_ids: frozenset[int]
    """eos, and what the template ends an answer or a turn of tool calls with: what ends a reply."""

    def renderer(self, authors: AuthorTable) -> Renderer:
        return Renderer(self.codec, self.template, authors=authors, stop_ids=self.stop_ids)


def load_model_files(path: Path) -> ModelFiles:
    """From a folder with tokenizer.json and a chat template, or from a .jinja file.

    A template alone gets a tokenizer trained on its own text, with every control token it spells.
    """
    if path.is_dir():
        return _from_folder(path)
    if path.suffix == ".jinja" and path.is_file():
        return from_template(path.read_text(encoding="utf-8"))
    raise RenderError(f"MODEL_OR_TEMPLATE must be a model folder or a .jinja file, got {str(path)!r}. Check the path.")


def from_template(source: str) -> ModelFiles:
    """A template with a byte-level tokenizer made for it: says what the template does, not what a model reads."""
    codec = TokenCodec(train_tokenizer(source.splitlines(), spelled_controls(source)).to_str())
    return _files(codec, ChatTemplate(source, _FALLBACK_SPECIALS), _FALLBACK_SPECIALS)


def spelled_controls(source: str) -> list[str]:
    """What looks like a control token in a template, and the fallback bos and eos."""
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


def _from_folder(folder: Path) -> ModelFiles:
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise RenderError(f"model folder must hold tokenizer.json, got none in {str(folder)!r}. Convert its tokenizer.")
    config = _json(folder / "tokenizer_config.json")
    named = {name: _text(value) for name, value in config.items() if name.endswith("_token")}
    special = {name: text for name, text in named.items() if text is not None}
    source = folder / "chat_template.jinja"
    written = source.read_text(encoding="utf-8") if source.is_file() else config.get("chat_template")
    if isinstance(written, list):  # several under names: the default one
        written = {row["name"]: row["template"] for row in written}.get("default")
    if not isinstance(written, str) or not written:
        raise RenderError(
            f"model folder must hold a chat template, got none in {str(folder)!r}. "
            "Use an instruction-tuned model, or put a chat_template.jinja there."
        )
    listed = _json(folder / "generation_config.json").get("eos_token_id")
    return _files(
        TokenCodec(tokenizer.read_text(encoding="utf-8")),
        ChatTemplate(written, special),
        special,
        [i for i in (listed if isinstance(listed, list) else [listed]) if isinstance(i, int)],
    )


def _files(
    codec: TokenCodec, template: ChatTemplate, special: Mapping[str, str], listed: Sequence[int] = ()
) -> ModelFiles:
    ends = [codec.token_id(special.get("eos_token", "")), *template_stops(template, codec)]
    stop_ids = frozenset(token for token in [*listed, *ends] if token is not None)
    if not stop_ids:
        raise RenderError("model must name an end-of-turn token, got none in its tokenizer or template.")
    return ModelFiles(codec, template, stop_ids)


def template_stops(template: ChatTemplate, codec: TokenCodec) -> set[int]:
    """The control tokens that end an answer and a turn of tool calls, as the template writes them.

    A template without an end of turn (GLM-4) has what opens the next turn in its place.
    """
    ends = (_end_of_turn(template, codec, plan) for plan in ("uau", "ucr"))
    return {end for end in ends if end is not None}


def _end_of_turn(template: ChatTemplate, codec: TokenCodec, plan: str) -> int | None:
    called = "c" in plan
    for length in (2, 3):  # the reply as the last message; then with what follows it
        text = _rendered(template, conversation(plan)[:length], generation_prompt=length == 3)
        # What stands between two calls of one turn belongs to a call, and does not end the turn.
        parallel = _rendered(template, conversation(plan.replace("c", "p"))[:length], generation_prompt=length == 3)
        repeated = codec.encode("".join(parallel.split(mark(1))[1:-1]))
        behind = codec.encode(text.partition(mark(1))[2].partition(mark(2))[0])
        controls = [token for token in behind if token in codec.added_ids.difference(repeated)]
        if controls:
            return controls[-1] if called and length == 2 else controls[0]
    return None


def _rendered(template: ChatTemplate, rows: list[dict[str, Any]], *, generation_prompt: bool) -> str:
    """Empty where the template refuses."""
    try:
        return template.render_rows(rows, generation_prompt=generation_prompt)
    except RenderError:
        return ""


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except json.JSONDecodeError as error:
        raise RenderError(f"{path.name} must be JSON, got: {error}. Mend the file.") from None
    return value if isinstance(value, dict) else {}


def _text(token: Any) -> str | None:
    """A special token as files name it: a text, or an object with its content."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None
