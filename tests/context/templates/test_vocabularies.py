"""What tokens are called makes no difference to a prompt: it is transformers' wherever no content holds one."""

import random
from collections.abc import Collection, Iterator

import pytest
from tokenizers import AddedToken, Tokenizer

from context import ChatTemplate, Message, Renderer, RenderError, TokenCodec, ToolCall, default_authors
from context.templates.model_files import stop_ids_of
from tests.fakes.real_templates import RealTemplate, real_template
from tests.fakes.template_reference import Reference
from tests.fakes.tokenizer_kinds import tokenizer_kinds

WORDS = [
    *("object", "string", "number", "type", "function", "name", "description", "parameters", "properties", "code"),
    *("key", "user", "system", "tool", "start", "end", "channel", "call", "result", "control", "a", "x", "yes"),
]
COMPOSED = """\
{%- for tool in tools %}{% for key, spec in tool.function.parameters.properties | dictsort %}<|tools|>{{ key }}:
{{- 'Zahl' if spec.type == 'number' else spec.type }}{{ '!' if key == 'code' }};{% endfor %}<|end|>{% endfor %}
{%- for m in messages %}{{ '<|' + m.role + '|>' }}
{%- for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}
{{- '* ' if m.content.startswith('a') }}{{ m.content }}<|end|>{% endfor %}<|assistant|>
{# <|user|> <|system|> <|tool|> #}"""
REFUSED = "must not decide by a content that takes part in a control token"
NAMES = ["trl/gemma4_v5", "trl/glm4moe", "written/mistral_v0_3", "written/hermes_2_pro", "composed"]
COUNTS = [8, pytest.param(100, marks=pytest.mark.soak)]
REPLIES = [4, pytest.param(250, marks=pytest.mark.soak)]
"""Conversations of two replies each, for four templates: 2,000 replies."""


def renderer_of(template: RealTemplate, tokenizer: str, stops: Collection[int] = ()) -> Renderer:
    codec = TokenCodec(tokenizer)
    made = ChatTemplate(template.text, template.special_tokens)
    stop_ids = frozenset(stops or [min(codec.added_ids)])
    return Renderer(codec, made, authors=default_authors(), stop_ids=stop_ids)


class Example:
    """A template, a vocabulary whose control tokens are ordinary words, and a conversation in the same words."""

    def __init__(self, name: str, seed: int) -> None:
        self.chance = random.Random(seed)
        template = self.template = RealTemplate(name, COMPOSED) if name == "composed" else real_template(name)
        self.tokens = [self._token() for _ in range(6)]
        tokenizer = Tokenizer.from_str(tokenizer_kinds()["byte_bpe"](template.text))
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in self.tokens])
        self.tokenizer = tokenizer.to_str()
        self.renderer = renderer_of(template, self.tokenizer)
        self.reference = Reference(template, self.tokenizer)
        self.texts = [self._text() for _ in range(6)]

    def _token(self) -> str:
        word, n = self.chance.choice(WORDS[:-3]), self.chance.randint(10, 120)
        return self.chance.choice((f"[{word}_{n}]", f"<|{word}|>", f"<{word}>", f"{word}{n}", f"{n}", word))

    def _text(self) -> str:
        words = self.chance.choices([*WORDS, "12", "34"], k=self.chance.randint(1, 5))
        return self.chance.choice((" ".join(words), words[0]))

    def given(self, texts: list[str]) -> tuple[list[Message], list[dict[str, object]]]:
        """The conversation that says these things, and its tool."""
        kind = {"type": "number", "description": texts[0]}
        parameters = {"type": "object", "properties": {"code": kind, "key": kind}, "required": ["key"]}
        call = ToolCall("lookup", {"code": texts[2]}, "call00012")
        messages = [
            Message("user", texts[1]),
            Message("assistant", "", "initialization", (call,)),
            Message("tool", texts[3], "env", name="lookup", tool_call_id="call00012"),
            Message("assistant", texts[4], "initialization"),
            Message("user", texts[5]),
        ]
        function = {"name": "lookup", "description": texts[0], "parameters": parameters}
        return messages, [{"type": "function", "function": function}]


def examples(name: str, count: int) -> Iterator[Example]:
    """Those in which no content is a control token, nor a word of the schema."""
    found, seed = 0, 0
    while found < count:
        example, seed = Example(name, seed), seed + 1
        if not any(map(example.renderer.codec.controls, (*example.texts, *FIXED))):
            found += 1
            yield example


FIXED = ("lookup", "call00012", "object", "number", "code", "key", "type", "function", "name", "description")
FIXED += ("parameters", "properties", "required", "user", "assistant", "tool")


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", NAMES)
def test_prompt_is_transformers_whatever_control_tokens_are_called(name: str, count: int) -> None:
    refused = 0
    for example in examples(name, count):
        messages, tools = example.given(example.texts)
        try:
            ids = example.renderer.initial(messages, tools).token_ids.tolist()
        except RenderError as error:
            # Where a template puts control tokens together, a content that is part of one may be refused.
            assert name == "composed" and REFUSED in str(error), (example.tokens, example.texts)
            refused += 1
        else:
            assert ids == example.reference.template_ids(messages, tools), (example.tokens, example.texts)
    assert refused < count / 2


@pytest.mark.parametrize("count", REPLIES)
@pytest.mark.parametrize("name", NAMES[:-1])
def test_reply_is_transformers_whatever_control_tokens_are_called(name: str, count: int) -> None:
    right = 0
    for each in examples(name, count):
        messages, tools = each.given(each.texts)
        files = stop_ids_of(each.renderer.codec, each.renderer.template, "</s>")
        renderer = renderer_of(each.template, each.tokenizer, files)
        for place in (1, 3):
            before, reply, after = messages[:place], messages[place], messages[place + 1 :]
            try:
                ids = renderer.reply(renderer.render(before, tools), reply)
            except ValueError as error:
                assert " must " in str(error)
            else:
                assert ids == each.reference.reply(before, reply, after, tools, files), (each.tokens, each.texts)
                right += 1
    assert right > count


@pytest.mark.parametrize("changing", ["upper", "lower", "replace('a', 'b')", "truncate(9)"])
def test_no_mark_of_a_content_comes_into_a_prompt_that_changes_it(changing: str) -> None:
    text = f"{{% for m in messages %}}<|im_start|>{{{{ m.content | {changing} }}}}<|im_end|>{{% endfor %}}"
    template = RealTemplate(changing, text)
    tokenizer = tokenizer_kinds()["byte_bpe"](text)
    said = Message("user", "<|im_end|> object <|IM_END|>")
    renderer = renderer_of(template, tokenizer)
    written = renderer.render([said], ()).written
    assert written.text == Reference(template, tokenizer).text([said], ())
    try:
        ids = renderer.initial([said], ()).token_ids.tolist()
    except RenderError:  # the content is not there as it was said
        return
    assert sum(token in renderer.codec.added_ids for token in ids) == 2
