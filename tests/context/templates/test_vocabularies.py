"""What tokens are called makes no difference to a prompt: it is transformers' wherever no content holds one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count as numbers
from itertools import islice

import pytest

from context import Message, Renderer, RenderError, TokenCodec, default_authors
from context.templates.chat_template import ChatTemplate
from tests.fakes.random_vocabularies import Example, example, tokenizer_with
from tests.fakes.real_templates import RealTemplate
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


def test_no_mark_of_a_content_comes_into_a_prompt_that_changes_it() -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.content | FILTER }}<|im_end|>{% endfor %}"
    for name in ("upper", "lower", "replace('a', 'b')", "truncate(9)"):
        template = RealTemplate(name, "made", source.replace("FILTER", name))
        tokenizer = tokenizer_with(["<|im_start|>", "<|im_end|>"])
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
