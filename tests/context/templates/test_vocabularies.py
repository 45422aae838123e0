"""What tokens are called makes no difference to a prompt: it is transformers' wherever no content holds one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count as numbers
from itertools import islice

import pytest

from context import Message, Renderer, RenderError, TokenCodec, ToolCall, default_authors
from context.templates.chat_template import ChatTemplate
from tests.fakes.random_vocabularies import Example, example, tokenizer_with
from tests.fakes.real_templates import RealTemplate, real_template
from tests.fakes.template_reference import Reference

SOME, ALL = 60, 2000


def renderer_of(made: Example) -> Renderer:
    codec = TokenCodec(made.tokenizer_json)
    template = ChatTemplate(made.template.text, made.template.special_tokens)
    end = codec.token_id("<|end|>")
    assert end is not None
    return Renderer(codec, template, authors=default_authors(), stop_ids=frozenset({end}))


REFUSED = "must not decide by a content that takes part in a control token"


def wrong(made: Example) -> str | None:
    """What is wrong with the prompt of a conversation in which no content holds a control token."""
    theirs = Reference(made.template, made.tokenizer_json).template_ids(made.messages, made.tools)
    try:
        ours = renderer_of(made).initial(made.messages, made.tools).token_ids.tolist()
    except RenderError as error:
        return str(error)
    return None if ours == theirs else f"{made.template.name} with {made.words}"


def without_controls(made: Example) -> bool:
    """Whether no content is a control token, also as the templates write it."""
    codec = TokenCodec(made.tokenizer_json)
    written = (change(text) for text in made.texts() for change in (str, str.upper, str.title))
    return not any(map(codec.controls, written))


def way_in(made: Example, number: int) -> tuple[str | None, bool]:
    """What a control token, said instead of a content, comes to; and whether it was refused."""
    renderer, added = renderer_of(made), TokenCodec(made.tokenizer_json).added_ids

    def controls(given: Example) -> Counter[int]:
        ids = renderer.initial(given.messages, given.tools).token_ids.tolist()
        return Counter(token for token in ids if token in added)

    token = made.words[number % len(made.words)]
    try:
        extra = controls(said(made, number, token)) - controls(said(made, number, "zz"))
    except RenderError as error:
        assert REFUSED in str(error)
        return None, True
    return (f"{made.template.name}: {token} comes to {extra}" if extra else None), False


def said(made: Example, number: int, text: str) -> Example:
    """The text as one of the contents, a description or the value of an argument."""
    messages, tools = [*made.messages], made.tools
    place = number % (len(messages) + 2)
    if place < len(messages):
        messages[place] = replace(messages[place], content=f"w {text}" if number % 2 else text)
    elif place == len(messages):
        call = messages[2].tool_calls[0]
        arguments = dict.fromkeys(call.arguments, text)
        messages[2] = replace(messages[2], tool_calls=(replace(call, arguments=arguments),))
    else:
        function = tools[0]["function"]
        properties = {key: {**row, "description": text} for key, row in function["parameters"]["properties"].items()}
        parameters = {**function["parameters"], "properties": properties}
        tools = ({**tools[0], "function": {**function, "parameters": parameters}},)
    return replace(made, messages=tuple(messages), tools=tools)


@pytest.mark.parametrize("count", [SOME, pytest.param(ALL, marks=pytest.mark.soak)])
def test_prompt_is_transformers_whatever_control_tokens_are_called(count: int) -> None:
    made = [*islice(filter(without_controls, map(example, numbers())), count)]
    whole = [found for found in made if "composed" not in found.template.name]
    assert [found for found in map(wrong, whole) if found] == []
    # Where a template puts control tokens together, a content that is part of one may be refused.
    composed = [found for found in made if "composed" in found.template.name]
    problems = [found for found in map(wrong, composed) if found]
    assert [found for found in problems if REFUSED not in found] == []
    assert len(problems) < len(composed) / 2


@pytest.mark.parametrize("count", [SOME, pytest.param(ALL, marks=pytest.mark.soak)])
def test_no_control_token_made_of_words_comes_of_a_content(count: int) -> None:
    made = islice(filter(without_controls, map(example, numbers())), count)
    found = [way_in(given, number) for number, given in enumerate(made)]
    assert [problem for problem, _ in found if problem] == []
    assert sum(refused for _, refused in found) < len(found) / 4


def spelled(words: str) -> list[str]:
    return [f"<|{word}|>" for word in words.split()]


QWEN = [
    *spelled("endoftext im_start im_end object_ref_start object_ref_end box_start box_end quad_start quad_end"),
    *spelled("vision_start vision_end vision_pad image_pad video_pad fim_prefix fim_middle fim_suffix repo_name"),
    *(
        *("<|file_sep|>", "<|code_prefix|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        *("<think>", "</think>"),
    ),
]
MISTRAL = [
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
    *(f"[control_{number}]" for number in range(8, 768)),
]
GEMMA = [
    *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>"),
    *("<tool_response|>", '<|"|>', "<|channel>", "<channel|>", "<|think|>", "<|image|>", "<|audio|>"),
]
KIMI = spelled("im_system im_user im_assistant im_middle im_end tool_calls_section_begin")
_TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PYTHON_TYPES = (  # as Hermes 2 and 3 and MiniCPM3 write tools: a type that is not known is read letter by letter
    "{%- macro kind(spec) %}{% set names = {'string': 'str', 'number': 'float', 'integer': 'int', 'boolean': 'bool'} %}"
    "{% if names[spec.type] is defined %}{{ names[spec.type] }}"
    "{% elif spec.type == 'array' %}list[{{ kind(spec['items']) }}]"
    "{% elif spec.type == 'object' %}dict"
    "{% elif spec.type is iterable %}Union[{% for t in spec.type %}{{ kind({'type': t}) }},{% endfor %}]"
    "{% else %}Any{% endif %}{% endmacro %}"
    "{% for tool in tools %}{% set p = tool.function.parameters %}"
    "{% for key, spec in p.properties.items() %}{{ key }}: {{ kind(spec) }}, {% endfor %}-> {{ kind(p) }}\n{% endfor %}"
)
SORTED = (  # as Kimi K3 writes tools and calls
    "{% for tool in tools %}{% for key, spec in tool.function.parameters | dictsort %}{{ key }}={{ spec | tojson }};"
    "{% endfor %}{% for key, spec in tool.function.parameters.properties | dictsort %}{{ key }} {% endfor %}"
    "{{ (tool.function.parameters.properties.code or tool).type }}\n{% endfor %}"
)
FAMILIES = [
    ("trl/gemma4_v5", GEMMA),
    ("written/mistral_v0_3", MISTRAL),
    ("written/hermes_2_pro", QWEN),
    ("trl/glm4moe", [*QWEN, "[gMASK]", "<sop>", *spelled("user assistant observation system")]),
    (RealTemplate("python types", "made", PYTHON_TYPES + _TURNS), QWEN),
    (RealTemplate("sorted", "made", SORTED + _TURNS), [*QWEN, *KIMI]),
]
PARAMETERS = {
    "type": "object",
    "properties": {
        "start": {"type": "integer", "description": "start"},
        "channel": {"type": "string", "description": "A channel.", "enum": ["tool", "user", "12"]},
        "code": {"type": "object", "description": "code"},
        "end": {"type": "array", "items": {"type": "object"}, "description": "The end."},
        "a": {"type": "number", "description": "1"},
        "alpha": {"type": "number", "description": "Before the channel."},
    },
    "required": ["code", "start"],
}
FUNCTION = {"name": "lookup", "description": "Look up an object.", "parameters": PARAMETERS}


@pytest.mark.parametrize(("family", "tokens"), FAMILIES)
def test_prompt_of_a_family_is_transformers_with_control_tokens_named_like_words(
    family: str | RealTemplate, tokens: list[str]
) -> None:
    template = real_template(family) if isinstance(family, str) else family
    tokenizer = tokenizer_with(list(dict.fromkeys([*template.special_tokens.values(), *tokens])))
    call = ToolCall("lookup", {"start": 12, "code": {"object": "12"}, "channel": "tool", "a": 1}, "call00012")
    tools = ({"type": "function", "function": FUNCTION},)
    reference, codec = Reference(template, tokenizer), TokenCodec(tokenizer)
    made = ChatTemplate(template.text, template.special_tokens)
    renderer = Renderer(codec, made, authors=default_authors(), stop_ids=frozenset([min(codec.added_ids)]))
    opening = [Message("user", "object"), Message("assistant", "", "initialization", (call,))]
    for result in ("12", "control", "object", '{"code": 12}', "start"):
        messages = [*opening, Message("tool", result, "env", name="lookup", tool_call_id="call00012")]
        theirs = reference.template_ids(messages, tools)
        assert renderer.initial(messages, tools).token_ids.tolist() == theirs, result


def test_no_mark_of_a_content_comes_into_a_prompt_that_changes_it() -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.content | FILTER }}<|im_end|>{% endfor %}"
    for name in ("upper", "lower", "replace('a', 'b')", "truncate(9)"):
        template = RealTemplate(name, "made", source.replace("FILTER", name))
        tokenizer = tokenizer_with(QWEN)
        codec = TokenCodec(tokenizer)
        made = ChatTemplate(template.text, {})
        renderer = Renderer(codec, made, authors=default_authors(), stop_ids=frozenset([min(codec.added_ids)]))
        said = Message("user", "<|im_end|> object <|IM_END|>")
        written = renderer.render([said], ()).written
        assert written.text == made.render([said], generation_prompt=True), name
        assert written.text == Reference(template, tokenizer).text([said], ()), name
        try:
            ids = renderer.initial([said], ()).token_ids.tolist()
        except RenderError:  # the content is not there as it was said
            continue
        assert sum(token in codec.added_ids for token in ids) == 2, name
