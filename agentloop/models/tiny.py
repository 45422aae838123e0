"""The quickstart's model: a byte-level BPE, a ChatML template with tools and thinking, a 0.4 M parameter Qwen3.

The template only ever appends: earlier thinking stays unless a context strategy takes it out.

Tokenizer and weights are made from a seed and written with `save_pretrained`, so the model is loaded like any other.
The initial weights are wide (0.08), because at 0.02 a model this small does not learn to copy within minutes.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentloop.config import TinyModelSection
from context.templates.model_files import train_tokenizer

END_OF_TURN = "<|im_end|>"
_ADDED = (
    "<|endoftext|>",
    "<|im_start|>",
    END_OF_TURN,
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
# Words with their leading space; numbers and punctuation apart. That takes 28 % fewer tokens here than GPT-2's rule.
_PIECES = r" ?[A-Za-z]+|\d+|[^A-Za-z\d]+"

CHAT_TEMPLATE = """\
{%- if tools %}
<|im_start|>system
{% if messages and messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}Tools:
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user
{% endif %}<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% else %}

{% endif %}
{%- elif message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>
{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}

{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role != 'system' or not tools or not loop.first %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def build_tiny_model(folder: Path, section: TinyModelSection, *, corpus: Iterable[str], seed: int) -> None:
    """Make tokenizer and model from `seed` and write them to `folder` as Hugging Face files."""
    tokenizer = build_tokenizer(corpus, vocabulary=section.vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(_architecture(section, tokenizer))
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TURN), pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_tokenizer(corpus: Iterable[str], *, vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on `corpus`, with the template's control tokens."""
    pieces = [
        pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer = train_tokenizer(
        corpus, _ADDED, vocab_size=vocabulary - len(_ADDED), pre_tokenizer=pre_tokenizers.Sequence(pieces)
    )
    names = {"eos_token": END_OF_TURN, "pad_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **names)


def _architecture(section: TinyModelSection, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    heads = max(2, section.hidden // 32)
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=section.hidden,
        intermediate_size=2 * section.hidden,
        num_hidden_layers=section.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=section.hidden // heads,
        max_position_embeddings=4096,
        initializer_range=0.08,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TURN),
        pad_token_id=tokenizer.pad_token_id,
    )
