"""What templates do to history: verdicts on real ones, and on small ones made for each finding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from context import ChatTemplate, Renderer, RenderError, default_authors
from context.conversation_file import read_message
from context.templates.model_files import load_model_files
from context.templates.rendering.reply_end import Sampled
from context.templates.row_forms import LOOKUP
from context.templates.template_probe import Thinking, changes, conversation
from context.templates.template_report import TemplateReport, check_template
from tests.fakes.families import CHATML, LLAMA3, family
from tests.fakes.trl_templates import model

TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT


def states(verdict: TemplateReport) -> dict[str, str]:
    return {case.name: case.state for case in verdict.cases}


def rewrites(renderer: Renderer, *, event: str, thinking: Thinking, tools: bool = False) -> bool:
    """Whether some conversation that ends in a reply and the event is shown anew; refused ones aside."""
    turns = ("au",) if event == "user" else ("cr", "ar")
    return any(
        _rewrites(renderer, conversation(before + turn, thinking=thinking), (LOOKUP,) if tools else ())
        for before in ("u", "ucr", "uau", "ucrau")
        for turn in turns
    )


def _rewrites(renderer: Renderer, rows: list[dict[str, Any]], tools: tuple[dict[str, Any], ...]) -> bool:
    messages = [read_message(place, row) for place, row in enumerate(rows)]
    try:
        before = renderer.render(messages[:-2], tools)
        grown = renderer.render(messages, tools, after=before)
        tail = grown.written.text[len(before.written.text) :]
        stop = next((c.token for c in renderer.codec.controls(tail) if c.token in renderer.stop_ids), None)
        return renderer.increment(before, grown, Sampled("", stop)) is None
    except RenderError:
        return False


def chatml_renderer(source: str) -> Renderer:
    chatml = family("llama3" if source == LLAMA3 else "chatml")
    template = ChatTemplate(source, chatml.special_tokens)
    return Renderer(chatml.codec, template, authors=default_authors(), stop_ids=frozenset({chatml.end_id}))


THINKING: tuple[Thinking, Thinking] = ("none", "some")

# (name, after tool results, after a user), each (without thinking, with thinking)
KNOWN = [
    ("cohere", (False, False), (False, False)),
    ("deepseekv3", (True, True), (True, True)),  # the prompt opens a thought that history never shows
    ("gemma", (False, False), (False, False)),
    ("gemma4_v5", (False, False), (False, True)),
    ("glm4moe", (False, False), (False, True)),
    ("gptoss", (False, False), (True, True)),  # <|return|> becomes <|end|>
    ("lfm2_v2", (False, False), (False, False)),
    ("llama3_1", (False, False), (False, False)),
    ("nemotron_3_nano", (True, False), (True, True)),
    ("phi3", (False, False), (False, False)),
    ("qwen2_5", (False, False), (False, False)),
    ("qwen3", (False, False), (False, True)),
    ("qwen3_5_think", (False, False), (True, True)),
    ("qwen3_instruct_2507", (False, False), (False, False)),
]


@pytest.mark.parametrize(("name", "results", "user"), KNOWN, ids=[row[0] for row in KNOWN])
def test_real_templates_rewrite_history_when_their_text_shows_it(
    name: str, results: tuple[bool, bool], user: tuple[bool, bool]
) -> None:
    renderer = model(name).renderer(default_authors())
    for thinking in THINKING:
        assert rewrites(renderer, event="tool_results", thinking=thinking) == results[thinking == "some"]
        assert rewrites(renderer, event="user", thinking=thinking) == user[thinking == "some"]


@pytest.mark.parametrize("event", ["tool_results", "user"])
@pytest.mark.parametrize("source", [PLAIN, CHATML, LLAMA3], ids=["plain", "chatml", "llama3"])
def test_template_that_only_appends_rewrites_nothing(source: str, event: str) -> None:
    renderer = chatml_renderer(source)
    for thinking in (*THINKING, "empty"):
        for tools in (False, True):
            assert not rewrites(renderer, event=event, thinking=thinking, tools=tools)


def test_tools_that_move_to_the_last_user_rewrite_history() -> None:
    # As Mistral's templates have it.
    source = (
        "{% for m in messages %}{% if m.role == 'user' and tools and "
        "loop.index0 == (messages | map(attribute='role') | list | length) - 1 %}[{{ tools | tojson }}]{% endif %}"
        + TURN
        + "{% endfor %}"
        + PROMPT
    )
    renderer = chatml_renderer(source)
    assert rewrites(renderer, event="user", thinking="none", tools=True)
    assert not rewrites(renderer, event="user", thinking="none", tools=False)


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        (PLAIN, ()),
        (
            "{% for m in messages %}{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>"
            "{% endif %}" + TURN + "{% endfor %}" + PROMPT,
            ("message 1 (assistant): its thinking is left out",),
        ),
        (
            "{% for m in messages[-2:] %}" + TURN + "{% endfor %}" + PROMPT,
            ("message 0 (user): is left out",),
        ),
        (
            "{{ messages | length }}" + PLAIN,
            ("message 0 (user): is written differently",),
        ),
        (
            PLAIN + "{% if add_generation_prompt %}<think>\n{% endif %}",
            ("message 1 (assistant): begins otherwise than the prompt for it",),
        ),
        (
            PLAIN.replace("+ '<|im_end|>\n'", "+ ('<|return|>' if loop.last and m.role == 'assistant' else '<|end|>')"),
            ("message 1 (assistant): ends in another way",),
        ),
    ],
    ids=["nothing", "thinking", "window", "count", "prefill", "end"],
)
def test_changes_name_the_message_and_what_becomes_of_it(source: str, finding: tuple[str, ...]) -> None:
    rows = conversation("uau", thinking="some")
    assert changes(ChatTemplate(source, {}), rows, reply=1, tools=()) == finding


@pytest.mark.parametrize(
    ("around", "finding"),
    [
        ("<think>{{ m.reasoning_content }}</think>", ()),
        ("{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}", (1,)),
        (
            "{% if loop.last or m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}",
            (1,),  # as Qwen3 between tool results
        ),
        ("{% if loop.last %}<think></think>{% endif %}", ()),  # nothing that a reply could have said is lost
    ],
    ids=["kept", "never kept", "kept while last", "never shown"],
)
def test_empty_thinking_that_is_said_and_left_out_is_a_change(around: str, finding: tuple[int, ...]) -> None:
    begin = "{{ '<|im_start|>' + m.role + '\n' }}"
    thoughts = "{% if m.reasoning_content is defined %}" + around + "{% endif %}"
    source = "{% for m in messages %}" + begin + thoughts + "{{ m.content + '<|im_end|>\n' }}{% endfor %}" + PROMPT
    told = changes(ChatTemplate(source, {}), conversation("uau", thinking="empty"), reply=1, tools=())
    assert told == tuple(f"message {reply} (assistant): its thinking is left out" for reply in finding)


def test_changes_are_unknown_where_the_template_refuses_or_hides_the_reply() -> None:
    rows = conversation("uau")
    assert changes(ChatTemplate("{{ raise_exception('no') }}", {}), rows, reply=1, tools=()) is None
    assert changes(ChatTemplate("{{ messages[0].content }}", {}), rows, reply=1, tools=()) is None


def test_verdict_on_qwen3_is_that_a_user_takes_earlier_thinking_away() -> None:
    verdict = check_template(model("qwen3"))
    assert verdict.state == "rewrites_history" and verdict.hidden == ()
    assert states(verdict) == {
        "system message": "append_only",
        "two user turns": "append_only",
        "thinking, two user turns": "rewrites_history",
        "tools": "append_only",
        "tool results": "append_only",
        "tool results, then a user": "append_only",
        "thinking between tool results": "append_only",
        "empty thinking between tool results": "rewrites_history",
        "thinking, tools, then a user": "rewrites_history",
        "parallel tool calls": "append_only",
        "tool result after an unreadable call": "append_only",
        "empty reply": "append_only",
    }
    details = {case.name: case.details for case in verdict.cases}
    assert details["thinking, two user turns"] == (
        "message 1 (assistant): its thinking is left out",
        "message 3 (assistant): its thinking is left out",
    )


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("qwen2_5", "append-only"),
        (
            "qwen3",
            "rewrites history in 3 of 12 cases, first in 'thinking, two user turns': "
            "message 1 (assistant): its thinking is left out",
        ),
        (
            "llama3",
            "append-only; 'tools': unsupported, chat template must show every tool, got one that leaves lookup out of "
            "a prompt with the roles [user]",
        ),
    ],
)
def test_verdict_in_one_line_names_what_is_rewritten_and_what_does_not_work(name: str, line: str) -> None:
    assert check_template(model(name)).summary() == line


@pytest.mark.parametrize(
    ("name", "case", "why"),
    [
        ("gemma", "system message", "System role not supported"),
        ("gemma", "tools", "leaves lookup out of a prompt"),
        ("gemma", "tool results", "must alternate user/assistant"),
        ("cohere", "tool results", "must alternate user/assistant"),
        ("phi3", "tool results", r"leaves out messages\[2\] \(role tool\)"),
        ("idefics3", "tools", "leaves lookup out of a prompt"),
        ("llama3", "tools", "leaves lookup out of a prompt"),
    ],
)
def test_what_is_unsupported_says_why(name: str, case: str, why: str) -> None:
    (found,) = [row for row in check_template(model(name)).cases if row.name == case]
    assert found.state == "unsupported"
    (detail,) = found.details
    with pytest.raises(RenderError, match=why):
        raise RenderError(detail)


def test_verdict_says_what_cannot_be_shown_again() -> None:
    (case,) = [row for row in check_template(model("lfm2")).cases if row.name == "tool results"]
    assert case.state == "append_only"
    assert case.details[0].startswith("can't be shown again once rewritten: chat template must show every call")


def test_verdict_says_where_a_template_writes_anew_though_it_leaves_calls_out() -> None:
    (case,) = [row for row in check_template(model("deepseek_r1_distill")).cases if row.name == "tool results"]
    assert case.state == "rewrites_history"
    assert case.details[0] == "message 1 (assistant): is written differently"


def test_arguments_are_given_as_json_text_where_a_template_pastes_them() -> None:
    text = model("deepseekv3").template.render_rows(
        [*conversation("u"), {**conversation("uc")[1], "content": "so"}], generation_prompt=False
    )
    assert '```json\n{"key": "\uf8e0text1\uf8e1"}\n```' in text


def test_thinking_is_given_under_the_name_a_template_reads() -> None:
    text = model("gptoss").template.render_rows(conversation("ua", thinking="some"), generation_prompt=False)
    assert "<|channel|>analysis<|message|>\uf8e0thinking1\uf8e1<|end|>" in text


# (name, what ends an answer and a turn of calls beside the tokenizer's eos)
STOPS = [
    ("qwen3", {"<|im_end|>"}),
    ("llama3_1", {"<|eot_id|>"}),
    ("gptoss", {"<|return|>", "<|call|>"}),
    ("gemma4_v5", {"<turn|>", "<|tool_response>"}),
    ("glm4moe", {"<|user|>", "<|observation|>"}),
    ("deepseekv3", {"<｜end▁of▁sentence｜>"}),
    ("phi3", {"<|end|>"}),
]


@pytest.mark.parametrize(("name", "stops"), STOPS, ids=[row[0] for row in STOPS])
def test_stop_tokens_are_what_the_template_writes_behind_replies(name: str, stops: set[str]) -> None:
    files = model(name)
    assert {files.codec.decode([token]) for token in files.stop_ids} == stops | {"</s>"}


@pytest.mark.parametrize("written", ["file", "config", "named"])
def test_model_folder_is_read_without_the_model(tmp_path: Path, written: str) -> None:
    chatml = family("chatml")
    (tmp_path / "tokenizer.json").write_text(chatml.tokenizer.to_str())
    config: dict[str, object] = {"eos_token": {"content": "<|im_end|>"}}
    if written == "file":
        (tmp_path / "chat_template.jinja").write_text(CHATML)
    else:
        named = [{"name": "rag", "template": "x"}, {"name": "default", "template": CHATML}]
        config["chat_template"] = CHATML if written == "config" else named
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0]}')
    files = load_model_files(tmp_path)
    assert files.template.source == CHATML
    assert files.codec.hash == chatml.codec.hash
    assert files.stop_ids == {0, chatml.end_id}


def test_folder_without_a_template_or_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match=r"must hold tokenizer\.json"):
        load_model_files(tmp_path)
    (tmp_path / "tokenizer.json").write_text(family("chatml").tokenizer.to_str())
    with pytest.raises(RenderError, match="must hold a chat template"):
        load_model_files(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(RenderError, match=r"tokenizer_config\.json must be JSON"):
        load_model_files(tmp_path)
