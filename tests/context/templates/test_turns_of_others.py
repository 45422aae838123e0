"""What others write in the policy's place: trained once, without log-probs, whatever is rewritten afterwards."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from context import ContextManager, Message, RenderError, TokenSequence, ToolCall, choose_parser
from context.authors import HISTORY
from context.tokens.loss_mask import loss_mask, response_mask
from tests.context.tokens.test_properties import EPISODES, STRATEGIES, TEXTS, begin, fitted
from tests.fakes.conversations import TOOLS, Turn, laws, texts
from tests.fakes.families import family
from tests.fakes.real_templates import AUTHORS, TEMPLATES, renderer, shapes

EDIT, PLAN, JUDGE = "human_edit", "subagent:planner", "judge"
NO_END = {"gptoss"}
"""Templates that end an earlier reply with another token than the policy has to."""


def opening(said: str = "It is 78.", planned: str = "Ask again.") -> list[Message]:
    """Behind a user's message."""
    return [
        Message("assistant", said, EDIT),
        Message("user", "No thanks.", JUDGE),
        Message("assistant", planned, PLAN),
        Message("user", "Now you."),
    ]


def at(tokens: TokenSequence, author: str) -> np.ndarray:
    return np.asarray(tokens.authors == AUTHORS.code(author))


def first_prompt(name: str, *messages: Message, tools: bool = False) -> TokenSequence:
    return renderer(name).initial([Message("user", "What is it?"), *messages], TOOLS if tools else ())


@pytest.mark.parametrize("name", TEMPLATES)
def test_turn_in_the_policys_place_is_its_authors_up_to_the_stop_token(name: str) -> None:
    tokens, model = first_prompt(name, *opening()), renderer(name)
    for author, said in ((EDIT, "It is 78."), (PLAN, "Ask again.")):
        places = np.flatnonzero(at(tokens, author))
        assert (np.diff(places) == 1).all()
        ids = tokens.token_ids[places].tolist()
        assert (ids[-1] in model.stop_ids) == (name not in NO_END)
        assert said in model.codec.decode(ids)
    assert (response_mask(tokens, AUTHORS) == at(tokens, EDIT) | at(tokens, PLAN)).all()
    assert (loss_mask(tokens, AUTHORS) == at(tokens, EDIT)).all()
    assert np.isnan(tokens.behavior_log_probs).all() and (tokens.policy_versions == -1).all()
    as_told = [Message(m.role, m.content, "initialization" if m.role == "assistant" else m.author) for m in opening()]
    found = model.codec.decode(tokens.token_ids.tolist())
    assert found == model.codec.decode(first_prompt(name, *as_told).token_ids.tolist())


QWEN_CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": "pearl"}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize(
    ("name", "thought", "later", "written"),
    [
        ("qwen3", None, True, QWEN_CALL),
        ("qwen3", "weigh it", False, "<think>\nweigh it\n</think>\n\n" + QWEN_CALL),
        ("qwen3", "weigh it", True, QWEN_CALL),  # before a later user message, earlier thoughts are not shown
        ("llama3_1", None, True, '{"name": "lookup", "parameters": {"key": "pearl"}}<|eot_id|>'),
        ("gptoss", None, True, ' to=functions.lookup<|channel|>commentary json<|message|>{"key": "pearl"}<|call|>'),
        (
            *("glm4moe", None, True),
            "\n<think></think>\n<tool_call>lookup\n<arg_key>key</arg_key>\n<arg_value>pearl</arg_value>\n</tool_call>"
            "<|observation|>",
        ),
    ],
)
def test_call_in_the_policys_place_is_trained_as_the_policy_would_write_it(
    name: str, thought: str | None, later: bool, written: str
) -> None:
    called = (ToolCall("lookup", {"key": "pearl"}, "call00001"),)
    said = Message("assistant", "", EDIT, called, reasoning=thought)
    result = Message("tool", "78", "env", name="lookup", tool_call_id="call00001")
    following = (Message("assistant", "said", "initialization"), Message("user", "And now?")) if later else ()
    tokens = first_prompt(name, said, result, *following, tools=True)
    assert renderer(name).codec.decode(tokens.token_ids[at(tokens, EDIT)].tolist()) == written


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(turns=EPISODES, said=TEXTS.filter(lambda text: "<think>" not in text))
def test_tokens_from_outside_are_trained_exactly_once(name: str, strategy: str, turns: list[Turn], said: str) -> None:
    episode = begin(name, STRATEGIES[strategy], spoken=opening(said))
    episode.play(fitted(name, turns), tool_role=shapes(name)[1])
    laws(episode, renderer(name), hinted=strategy == "hint")
    model, (first, *later) = renderer(name), episode.context.segments()
    learned = at(first.tokens, EDIT)
    assert said in model.codec.decode(first.tokens.token_ids[learned].tolist())
    assert loss_mask(first.tokens, AUTHORS)[learned].all()
    assert at(first.tokens, PLAN).any() and not (loss_mask(first.tokens, AUTHORS) & at(first.tokens, PLAN)).any()
    for segment in later:
        assert not at(segment.tokens, EDIT).any() and not at(segment.tokens, PLAN).any()
        if segment.reason != "fork":
            assert "Ask again." in texts(segment, model, HISTORY)


def started(*messages: Message) -> ContextManager:
    context = ContextManager(renderer("qwen2_5"), choose_parser("hermes", ""), max_tokens=4000)
    context.begin(messages, ())
    return context


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (Message("user", "I say", EDIT), "messages.role must be assistant for author 'human_edit', who speaks in .* g"),
        (Message("assistant", "I say", "llm"), "messages.author must not be one whose tokens are sampled, got 'llm'"),
        (Message("assistant", "I say", "human_edt"), "author must be one of .*human_edit.*, got 'human_edt'"),
    ],
)
def test_message_its_author_can_not_have_written_is_refused(message: Message, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as raised:
        started(Message("user", "What is it?"), message)
    assert "\n" not in str(raised.value)


def test_turn_behind_a_reply_is_the_policys_own() -> None:
    context = started(Message("user", "What is it?"))
    context.record_reply([30, min(renderer("qwen2_5").stop_ids)], [-1.0, -1.0], policy_version=0)
    with pytest.raises(ValueError, match="got 'human_edit' for a later assistant message. Use 'initialization'"):
        context.observe([Message("assistant", "rather this", EDIT)])


BARE = "{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"
HIDING = BARE + "{% if add_generation_prompt %}<tool_call>{% endif %}"
FIRST = (Message("assistant", "I begin", EDIT), Message("user", "go"))
SECOND = (Message("user", "go"), Message("assistant", "I follow", EDIT))


@pytest.mark.parametrize(
    ("source", "messages", "said"),
    [
        (BARE, FIRST, "chat template must write something before an action author's message"),
        (HIDING, SECOND, "must begin a reply as it does when it asks for one"),
    ],
)
def test_template_without_a_place_for_a_turn_is_refused(source: str, messages: tuple[Message, ...], said: str) -> None:
    model = family("chatml")

    def spoken(source: str, messages: tuple[Message, ...]) -> str:
        tokens = model.renderer(source, AUTHORS).initial(messages, ())
        return model.codec.decode(tokens.token_ids[at(tokens, EDIT)].tolist())

    with pytest.raises(RenderError, match=said):
        spoken(source, messages)
    assert spoken(BARE, SECOND) == "I follow<|im_end|>"
