import pytest

from context import ChatTemplate
from context.parse import PARSERS, HermesParser, choose_parser, unread_call
from context.templates.chat_template import LOOKUP
from tests.context.parse.dialects import DIALECTS, Dialect
from tests.fakes.families import CHATML, LLAMA3
from tests.fakes.real_templates import SPECIAL_TOKENS, model, real_template


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL_TOKENS)


def chosen(chat_template: ChatTemplate, **options: object) -> str:
    kind = type(choose_parser("auto", chat_template, **options))
    return next(name for name, parser in PARSERS.items() if parser is kind)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.template)
def test_auto_takes_the_parser_of_the_dialect(dialect: Dialect) -> None:
    assert chosen(dialect.chat_template) == dialect.parser
    assert unread_call(PARSERS[dialect.parser](()), dialect.chat_template) is None


@pytest.mark.parametrize("name", ["cohere", "deepseek_r1_distill", "gemma3", "lfm2", "llama3", "phi3"])
def test_template_that_writes_or_takes_no_calls_gets_react(name: str) -> None:
    assert chosen(model(name).template) == "react"
    refusing = "{% for m in messages if m.tool_calls %}{{ raise_exception('no') }}{% endfor %}"
    assert chosen(template(refusing + model(name).template.source)) == "react"


@pytest.mark.parametrize("name", ["trl/lfm2", "axolotl/falcon_h1", "written/command_r7b"])
def test_template_that_shows_tools_and_leaves_calls_out_gets_no_parser_unnamed(name: str) -> None:
    shown = template(real_template(name).text.replace("m.tool_calls", "m.tool_plan"))
    with pytest.raises(ValueError, match=r"^context\.parser must be named for .* got 'auto'. Name the one that reads"):
        choose_parser("auto", shown, tools=[LOOKUP])
    # Command R7B writes tags around answers, which another parser would take for their text.
    assert chosen(shown) == ("command_a" if name == "written/command_r7b" else "react")
    assert isinstance(choose_parser("command_a", shown, tools=[LOOKUP]), PARSERS["command_a"])


def test_calls_that_are_written_only_once_they_are_answered_are_read() -> None:
    # Nemotron Nano 2 writes the content alone of a conversation's last reply.
    source = real_template("written/nemotron").text.replace("if m.tool_calls", "if m.tool_calls and not loop.last")
    assert chosen(template(source)) == "nemotron"


def test_dialect_that_nobody_reads_or_in_single_calls_only_is_named_with_its_example() -> None:
    source = real_template("written/granite_3").text.replace("<|tool_call|>", "<|begin_call|>")
    with pytest.raises(ValueError, match=r"parser must be a class of your own .* got 'auto' and '<\|begin_call\|>"):
        choose_parser("auto", template(source))
    source = real_template("written/nemotron").text.replace("{{ ', ' }}", "{{ ' and ' }}")
    with pytest.raises(ValueError, match="no built-in parser reads"):
        choose_parser("auto", template(source))


def test_named_parser_is_taken_whatever_the_template_writes() -> None:
    assert isinstance(choose_parser("hermes", template(LLAMA3)), HermesParser)
    unread = unread_call(HermesParser(), template(LLAMA3))
    assert unread is not None and unread.startswith('{"name": "find_stone", "parameters": {')
    with pytest.raises(ValueError, match=r"context\.parser must be one of auto, hermes, llama3_json, .*, got 'xml'"):
        choose_parser("xml", template(CHATML))


def test_schema_of_a_tool_says_what_is_text() -> None:
    properties = {
        "code": {"type": "string"},
        "count": {"type": "integer"},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "colour": {"enum": ["red", "3"]},
        **{f"{name}{odd}": {name: odd} for name in ("type", "anyOf", "enum") for odd in (5, {"x": 1}, [{}], None)},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    text = "<tool_call>f\n" + "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in [("code", "3"), ("count", "3"), ("either", "null"), ("colour", "3"), ("other", "3")]
    )
    unsaid = {"name": "f", "parameters": {"properties": ["code"]}}
    for tools, code, colour in (([tool], "3", "3"), ([], 3, 3), ([unsaid], 3, 3)):
        reply = choose_parser("glm", template(CHATML), tools=tools).parse(text + "</tool_call>", stopped=True)
        (call,) = reply.message.tool_calls
        assert call.arguments == {"code": code, "count": 3, "either": None, "colour": colour, "other": 3}
