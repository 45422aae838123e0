import math

import numpy as np
import pytest
import torch

from context import NOT_SAMPLED, Author, AuthorTable, ContextManager, Message, choose_parser, default_authors
from context.templates.chat_template import ChatTemplate
from context.tokens.loss_mask import loss_mask, response_mask
from tests.fakes import real_templates
from tests.fakes.families import Family, families, family

START = (Message("system", "You are careful.", "initialization"), Message("user", "What is the code?"))


@pytest.fixture(params=families())
def model(request: pytest.FixtureRequest) -> Family:
    return family(request.param)


def manager(model: Family, *, max_tokens: int = 4000) -> ContextManager:
    name = "hermes" if model.name == "chatml" else "llama3_json"
    return ContextManager(model.renderer(), choose_parser(name, ""), max_tokens=max_tokens)


def sampled(model: Family, text: str, *, stopped: bool = True) -> list[int]:
    ids = model.codec.encode(text)
    return [*ids, model.end_id] if stopped else ids


def log_probs(ids: list[int]) -> list[float]:
    return [-0.5 - i / 100 for i in range(len(ids))]


def test_what_answers_an_unreadable_call_is_a_users_where_a_tool_needs_a_call() -> None:
    model = family("mistral")
    context = manager(model)
    context.begin(START, ())
    ids = sampled(model, "[TOOL_CALLS] oops")
    context.record_reply(ids, log_probs(ids), policy_version=0)
    assert context.observe([model.tool_result("bad call")]) is None
    assert model.codec.decode(context.prompt_ids[-30:]).endswith("[INST] bad call[/INST]")
    assert context.messages[-1] == model.tool_result("bad call")


def test_masks_cover_the_sampled_tokens_and_nothing_else(model: Family) -> None:
    context, table = manager(model), default_authors()
    context.begin(START, ())
    n = len(context.prompt_ids)
    ids = sampled(model, model.call)
    versions = [3, *range(3, 2 + len(ids))]
    context.record_reply(ids, log_probs(ids), policy_version=versions)
    assert context.observe([model.tool_result("78")]) is None
    tokens = context.segments()[0].tokens
    sampled_at = np.zeros(len(tokens), bool)
    sampled_at[n : n + len(ids)] = True
    assert (response_mask(tokens, table) == sampled_at).all()
    assert (loss_mask(tokens, table) == sampled_at).all()
    assert tokens.token_ids[sampled_at].tolist() == ids
    assert tokens.behavior_log_probs[sampled_at].tolist() == np.float32(log_probs(ids)).tolist()
    assert np.isnan(tokens.behavior_log_probs[~sampled_at]).all()
    assert tokens.policy_versions[sampled_at].tolist() == versions
    assert (tokens.policy_versions[~sampled_at] == NOT_SAMPLED).all()


def test_length_stopped_reply_gets_no_end_token(model: Family) -> None:
    context = manager(model)
    context.begin(START, ())
    before = context.prompt_ids
    ids = sampled(model, "The code is", stopped=False)
    reply = context.record_reply(ids, log_probs(ids), policy_version=0)
    assert (reply.outcome, reply.message.content) == ("truncated", "The code is")
    tokens = context.segments()[0].tokens
    assert tokens.token_ids.tolist() == [*before, *ids]
    assert tokens.token_ids[loss_mask(tokens, default_authors())].tolist() == ids
    with pytest.raises(RuntimeError, match="observe must follow a reply that ended its turn"):
        context.observe([model.tool_result("x")])


def test_message_of_a_hidden_author_is_kept_and_not_shown(model: Family) -> None:
    table = AuthorTable([*default_authors().authors, Author("judge", False, False, shown=False)])
    renderer = model.renderer(authors=table)
    for author in ("judge", "memory(discard)"):
        context = ContextManager(renderer, choose_parser("hermes", ""), max_tokens=4000)
        context.begin([*START, Message("user", "secret", author)], ())
        assert context.prompt_ids == renderer.initial(START, ()).token_ids.tolist()
        assert context.messages[-1].content == "secret"


def test_observation_that_does_not_fit_changes_nothing(model: Family) -> None:
    long, ids, result = manager(model), sampled(model, model.call), Message("user", "78", "env")
    long.begin(START, ())
    long.record_reply(ids, log_probs(ids), policy_version=0)
    long.observe([result])
    full = len(long.prompt_ids)
    for max_tokens, fits in ((full + 1, True), (full, False), (full - 1, False)):
        context = manager(model, max_tokens=max_tokens)
        context.begin(START, ())
        context.record_reply(ids, log_probs(ids), policy_version=0)
        before = context.prompt_ids, context.messages, context.room
        assert context.observe([result]) == (None if fits else "context_full")
        if fits:
            assert (context.room, context.messages[-1]) == (1, result)
        else:
            assert (context.prompt_ids, context.messages, context.room) == before


def test_reply_in_arrays_is_the_one_in_lists() -> None:
    ids = sampled(family("chatml"), "41")
    found = []
    for as_given in (list, np.array, torch.tensor):
        context = manager(family("chatml"))
        context.begin(START)
        reply = context.record_reply(as_given(ids), as_given(log_probs(ids)), policy_version=0)
        found.append((reply, context.prompt_ids))
    assert found[0] == found[1] == found[2] and found[0][0].outcome == "final"


@pytest.mark.parametrize(
    ("template", "end"),
    [("qwen3_5_think", "</think>"), ("written/deepseek_v4", "</think>"), ("written/kimi_k3", "<|close|>think<|sep|>")],
)
def test_thought_that_the_prompt_opens_and_the_reply_does_not_close_is_no_answer(template: str, end: str) -> None:
    files = real_templates.model(template)
    context = ContextManager(files.renderer(default_authors()), choose_parser("auto", files.template), max_tokens=4000)
    context.begin(START)
    ids = [*files.codec.encode_text("It is 78."), min(files.stop_ids)]
    reply = context.record_reply(ids, log_probs(ids), policy_version=0)
    assert (reply.outcome, reply.problem) == ("malformed", f"the thinking is not closed with {end}")


def test_messages_that_are_none_are_refused_by_name() -> None:
    model, row = family("chatml"), {"role": "user", "content": "x"}
    renderer = model.renderer()
    for given in (manager(model).begin, renderer.initial, lambda it: renderer.reply(renderer.render(START, ()), *it)):
        with pytest.raises(ValueError, match=r"messages must hold Message, got dict\. Write Message\(role, content\)"):
            given([row])
    assert len(model.renderer().initial([Message(**row)], None))


@pytest.mark.parametrize(
    ("ids", "values", "version", "complaint"),
    [
        ([], [], 0, "token_ids must hold 1 to [0-9]+ tokens .*, got 0"),
        ([30] * 5000, [-1.0] * 5000, 0, "token_ids must hold 1 to [0-9]+ tokens .*, got 5000"),
        ([30, 31], [-1.0], 0, r"log_probs must have one entry per token \(2\), got 1"),
        ([30, 31], [-1.0, math.nan], 0, "log_probs must be finite, or all NaN"),
        ([30, 31], [-1.0, -math.inf], 0, "log_probs must be finite, or all NaN"),
        ([30, -1], [-1.0, -1.0], 0, "token_ids must not be negative and log_probs not above 0, got -1 and -1"),
        ([30, 31], [-1.0, 0.7], 0, "token_ids must not be negative and log_probs not above 0, got 30 and 0.7"),
        ([30, 31], [-1.0, -1.0], (3, 3, 4), r"policy_versions must have one entry per token \(2\), got 3"),
    ],
)
def test_wrong_reply_is_an_error_naming_the_field(ids, values, version, complaint: str) -> None:
    context = manager(family("chatml"))
    context.begin(START, ())
    before = context.prompt_ids
    with pytest.raises(ValueError, match=complaint):
        context.record_reply(ids, values, policy_version=version)
    assert context.prompt_ids == before


def test_calls_out_of_turn_are_refused() -> None:
    model = family("chatml")
    context = manager(model)
    with pytest.raises(RuntimeError, match="record_reply must follow begin or observe"):
        context.record_reply([30], [-1.0], policy_version=0)
    with pytest.raises(ValueError, match="messages must hold at least one message"):
        context.begin([], ())
    context.begin(START, ())
    with pytest.raises(RuntimeError, match="begin must be called once"):
        context.begin(START, ())
    with pytest.raises(RuntimeError, match="observe must follow a reply"):
        context.observe([])
    context.record_reply([30, model.end_id], [-1.0, -1.0], policy_version=0)
    with pytest.raises(RuntimeError, match="record_reply must follow begin or observe"):
        context.record_reply([30], [-1.0], policy_version=0)


def test_a_long_result_costs_one_rendering_of_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    model, written, render = family("chatml"), [], ChatTemplate.render
    context = manager(model)
    context.begin(START, ())
    monkeypatch.setattr(ChatTemplate, "render", lambda *given, **named: written.append(1) or render(*given, **named))
    for number in range(8):
        context.record_reply(ids := sampled(model, model.call), log_probs(ids), policy_version=0)
        assert context.observe([model.tool_result(f"{number}: the record of the pearl names the coral")]) is None
        assert len(written) == number + 1
