"""Three model families in miniature: a tokenizer trained on the spot, a template in the family's manner."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from context import AuthorTable, ChatTemplate, Message, Renderer, TokenCodec, default_authors
from context.templates.model_files import train_tokenizer

CORPUS = [
    "You are a careful agent. What is the code of pearl? The code is 78.",
    '{"name": "lookup", "arguments": {"key": "pearl"}, "parameters": {"next": "arrow", "see": "coral"}}',
    "system user assistant tool ipython im_start im_end end_header_id INST TOOL_CALLS <|begin_of_text|> </s>",
] * 20

_TEMPLATES = Path(__file__).parent / "templates" / "families"
CHATML, LLAMA3, MISTRAL = (
    (_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    for name in ("chatml", "llama3", "mistral")
)


@dataclass(frozen=True)
class Family:
    name: str
    tokenizer: Tokenizer
    template_source: str
    special_tokens: dict[str, str]
    end: str
    """The stop token."""
    call: str
    """A sampled tool call to `lookup` with key `pearl`, without its stop token."""

    @property
    def codec(self) -> TokenCodec:
        return _codec(self.name)

    @property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.template_source, self.special_tokens)

    @property
    def end_id(self) -> int:
        token = self.codec.token_id(self.end)
        assert token is not None
        return token

    def renderer(self, source: str | None = None, authors: AuthorTable | None = None) -> Renderer:
        """The family's vocabulary, with another template if a source is given."""
        template = self.template if source is None else ChatTemplate(source, {})
        stop_ids = frozenset({self.end_id})
        return Renderer(self.codec, template, authors=authors or default_authors(), stop_ids=stop_ids)

    def save(self, folder: Path) -> Path:
        """As a model's folder has it, without a model."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self.tokenizer.to_str())
        (folder / "tokenizer_config.json").write_text(json.dumps(self.special_tokens))
        (folder / "chat_template.jinja").write_text(self.template_source)
        return folder

    def tool_result(self, content: str) -> Message:
        return Message("tool", content, author="env", name="lookup")


def families() -> list[str]:
    return ["chatml", "llama3", "mistral"]


@cache
def family(name: str) -> Family:
    if name == "chatml":
        controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>"]
        tokenizer = train_tokenizer(CORPUS, controls, vocab_size=600 - len(controls))
        call = '<tool_call>\n{"name": "lookup", "arguments": {"key": "pearl"}}\n</tool_call>'
        return Family(name, tokenizer, CHATML, {"eos_token": "<|im_end|>"}, "<|im_end|>", call)
    if name == "llama3":
        tokenizer = train_tokenizer(CORPUS, [])
        tokenizer.model.ignore_merges = True
        names = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"]
        tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in names])
        special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
        call = '{"name": "lookup", "parameters": {"key": "pearl"}}'
        return Family(name, tokenizer, LLAMA3, special, "<|eot_id|>", call)
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=[AddedToken(token, normalized=False) for token in names],
        initial_alphabet=[chr(c) for c in range(33, 127)] + ["\n"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("[AVAILABLE_TOOLS]"), AddedToken("[/AVAILABLE_TOOLS]")])
    call = '[TOOL_CALLS] [{"name": "lookup", "arguments": {"key": "pearl"}}]'
    return Family(name, tokenizer, MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"}, "</s>", call)


@cache
def _codec(name: str) -> TokenCodec:
    return TokenCodec(family(name).tokenizer.to_str())
