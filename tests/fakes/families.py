"""Three model families in miniature: a tokenizer trained on the spot, a template in the family's manner."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from context import ChatTemplate, Message, Renderer, TokenCodec, default_authors
from context.templates.model_files import train_tokenizer

CORPUS = [
    "You are a careful agent. What is the code of pearl? The code is 78.",
    '{"name": "lookup", "arguments": {"key": "pearl"}, "parameters": {"next": "arrow", "see": "coral"}}',
    "system user assistant tool ipython im_start im_end end_header_id INST TOOL_CALLS <|begin_of_text|> </s>",
] * 20

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\nAnswer, or call as <tool_call>...</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role in ('user', 'assistant') and not m.tool_calls or m.role == 'system' and not loop.first %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant' }}
{%- if m.content %}{{ '\\n' + m.content }}{% endif %}
{%- for call in m.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system + '<|eot_id|>' }}
{%- if tools %}
{%- set first = messages[0].content | trim %}{% set messages = messages[1:] %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nTools:\\n\\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}
{{- first + '<|eot_id|>' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role in ('tool', 'ipython') %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if m.content is iterable %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}
{{- '<|eot_id|>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
{{- '"parameters": ' }}{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- set ns = namespace(called=false, system='') %}
{%- if tools %}{{ '[AVAILABLE_TOOLS] ' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' %}{% set ns.system = m.content + '\\n\\n' %}
{%- elif m.role == 'user' %}{{ '[INST] ' + ns.system + m.content + '[/INST]' }}{% set ns.system = '' %}
{%- elif m.role == 'tool' %}
{%- if not ns.called %}{{ raise_exception('a tool result needs a tool call before it') }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' }}{{ m.content | tojson }}{{ '}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{% set ns.called = true %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}{{ '}' }}
{%- if not loop.last %}{{ ', ' }}{% endif %}
{%- endfor %}{{ ']' + eos_token }}
{%- else %}{{ ' ' + m.content + eos_token }}
{%- endif %}{% endfor %}"""


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

    def renderer(self) -> Renderer:
        return Renderer(self.codec, self.template, authors=default_authors(), stop_ids=frozenset({self.end_id}))

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
