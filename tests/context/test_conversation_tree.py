"""Whole conversations in, exact tokens out: what an agent's requests stand for, and what of them is trained."""

import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from context import Message, ToolCall, default_authors
from context.conversation_tree import INSTRUCTION, ConversationTree, Prompt
from context.messages import content_hash
from context.tokens.session_nodes import Fork, Node, Place, Status, offered_tools, path_of, tokens_of
from context.tokens.session_segments import segments_of
from tests.fakes.families import family
from tests.fakes.random_agents import PARSERS, TOOLS, RandomSession, random_session, tree_of

AUTHORS = default_authors()
SOAK = [pytest.mark.soak, pytest.mark.timeout(3600)]
LLM = AUTHORS.code("llm")
ASKED = [Message("system", "You look things up."), Message("user", "Find pearl.")]


def answered(tree: ConversationTree, prompt: Prompt, text: str, *, ended: bool = True, **given: Any) -> Node:
    """A node with this reply, delivered."""
    model = family("chatml")
    ids = [*model.codec.encode(text), *([model.end_id] if ended else [])]
    node, _ = tree.add(prompt, ids, [-0.5] * len(ids), policy_version=0, **given)
    tree.delivered(node.number)
    return tree.nodes[node.number]


@pytest.fixture
def tree() -> ConversationTree:
    return tree_of(family("chatml"))


def test_each_fork_is_told_apart(tree: ConversationTree) -> None:
    asked = [Message("user", "Find arrow.")]
    cut = answered(tree, tree.prompt(asked, TOOLS), "It is", ended=False).messages[-1]
    thinking = answered(tree, tree.prompt(ASKED, TOOLS), "<think>\nhm\n</think>\n\nIt is 78.")
    said, more = thinking.messages[-1], Message("user", "Sure?")
    forks = {
        "goes on": ([*ASKED, said, more], TOOLS),
        "stripped": ([*ASKED, replace(said, reasoning=None), more], TOOLS),
        "edited": ([ASKED[0], Message("user", "Find coral."), said, more], TOOLS),
        "other tools": ([*ASKED, said, more], TOOLS[:1]),
        "again": (ASKED, TOOLS),
        "cut by its limit": ([*asked, cut, more], TOOLS),
        "another": ([Message("system", "You plan."), ASKED[1]], TOOLS),
    }
    found = {name: tree.prompt(*request).place.fork for name, request in forks.items()}
    assert found == {
        "goes on": None,
        "stripped": Fork.THINKING,
        "edited": Fork.EDITED,
        "other tools": Fork.TOOLS,
        "again": Fork.RETRY,
        "cut by its limit": Fork.CUT,
        "another": Fork.NEW,
    }


def test_what_is_said_again_from_text_behind_a_reply_is_a_fork_behind_its_exact_tokens(tree: ConversationTree) -> None:
    first, more = answered(tree, tree.prompt(ASKED), "It  is 78."), Message("user", "Sure?")
    asked = [*ASKED, first.messages[-1], more]
    second = answered(tree, tree.prompt(asked), "<think>\nhm\n</think>\n\nYes.").messages[-1]
    own = Message("assistant", "No.")
    found = {
        "goes on": tree.prompt([*asked, second, more]),
        "stripped": tree.prompt([*asked, replace(second, reasoning=None), more]),
        "rewritten": tree.prompt([*asked, own, more]),
        "edited before": tree.prompt([*asked[:3], Message("user", "(cleared)"), second, more]),
        "left out": tree.prompt([*asked, more]),
    }
    forks = {name: prompt.place.fork for name, prompt in found.items()}
    edited = dict.fromkeys(("rewritten", "edited before"), Fork.EDITED)
    assert forks == {"goes on": None, "stripped": Fork.THINKING, **edited, "left out": None}
    path = tokens_of(tree.nodes, path_of(tree.nodes, 0)).token_ids.tolist()
    assert {tuple(prompt.ids[: len(path)]) for prompt in found.values()} == {tuple(path)}
    assert [prompt.follows for prompt in found.values()] == [1, 1, 0, 0, 0]  # whose reply the agent shows that it has
    other = answered(tree, tree.prompt(ASKED[1:]), "Hm.").messages[-1]
    assert tree.prompt([ASKED[1], other, more, second, more]).place.fork == Fork.EDITED


@pytest.mark.parametrize("name", PARSERS)
def test_ids_that_an_agent_gives_each_turn_are_of_that_turns_calls(name: str) -> None:
    def asked(*ids: str | None) -> Prompt:
        model, said = family(name), [*ASKED]
        tree = tree_of(model)
        for id, tool in zip(ids, ("lookup", "search", "lookup"), strict=True):
            call = [*model.codec.encode(model.call.replace("lookup", tool)), model.end_id]
            node, reply = tree.add(tree.prompt(said, TOOLS), call, [-0.5] * len(call), policy_version=0)
            known = id or tree.call_ids(node.number)[0]
            said += [replace(reply.message, tool_calls=(replace(reply.message.tool_calls[0], id=known),))]
            said += [Message("tool", f"of {tool}", tool_call_id=known)]
        return tree.prompt(said, TOOLS)

    ours, own = asked(None, None, None), asked("call_0_0", "call_0_0", "call_0_0")
    assert [message.name for message in own.given if message.role == "tool"] == ["lookup", "search", "lookup"]
    assert (own.ids, own.place, own.place.parent, own.place.fork) == (ours.ids, ours.place, 2, None)


def test_a_request_without_a_reply_is_nothing_that_others_begin_with(tree: ConversationTree) -> None:
    more = Message("user", "Shorter, then.")
    tree.refuse(tree.prompt(ASKED))
    assert tree.prompt([*ASKED, more]).place == Place(None, 0, 0, content_hash([]), Fork.NEW)
    first = answered(tree, tree.prompt(ASKED), "It is 78.")
    asked = [*ASKED, first.messages[-1], Message("user", "Sure?")]
    tree.refuse(tree.prompt(asked))
    for said in (asked, [*asked, more]):
        assert (tree.prompt(said).place.parent, tree.prompt(said).place.fork) == (first.number, None)


def test_a_reply_that_was_not_delivered_is_what_an_equal_request_is_given(tree: ConversationTree) -> None:
    model = family("chatml")
    first = tree.prompt(ASKED)
    node, _ = tree.add(first, [model.end_id], [-0.5], policy_version=0)
    assert tree.prompt(ASKED).repeats == 0
    assert tree.prompt(ASKED, TOOLS).repeats is None  # it was said in sight of other tools
    tree.delivered(node.number)
    again = tree.prompt(ASKED)
    assert (again.repeats, again.place.fork, again.place.parent, len(again.rest)) == (None, Fork.RETRY, 0, 0)
    assert again.ids == first.ids


def test_of_equal_replies_each_agent_goes_on_from_its_own_if_it_was_delivered(tree: ConversationTree) -> None:
    statuses = [*[Status.TRAINED] * 3, Status.UNDELIVERED, Status.ASIDE]
    for agent, status in zip("abcde", statuses, strict=True):
        tree.add(tree.prompt(ASKED), [family("chatml").end_id], [-0.5], policy_version=0, agent=agent, status=status)
    more = [*ASKED, Message("assistant", ""), Message("user", "Sure?")]
    assert [tree.prompt(more, agent=agent).place.parent for agent in "abcde"] == [0, 1, 2, 2, 2]


def test_arguments_in_another_order_or_form_or_with_defaults_are_the_same_call(tree: ConversationTree) -> None:
    call = family("chatml").call.replace('"pearl"', '"pearl", "depth": 3')
    node = answered(tree, tree.prompt(ASKED, TOOLS), call)
    (said,) = node.messages[-1].tool_calls
    turned = ToolCall(said.name, {"depth": 3.0, "key": "pearl"}, tree.call_ids(0)[0])
    for given, goes_on in [
        (turned, True),
        (replace(turned, arguments={**turned.arguments, "exact": False}), True),  # a default of its tool's
        (replace(turned, arguments={**turned.arguments, "key": "coral"}), False),
        (replace(turned, arguments={"key": "pearl"}), False),
        (replace(turned, name="search"), False),
    ]:
        reply = replace(node.messages[-1], tool_calls=(given,))
        place = tree.prompt([*ASKED, reply, Message("tool", "78", tool_call_id=given.id)], TOOLS).place
        assert (place.kept_messages == 3) == goes_on


@pytest.mark.parametrize("ended", [True, False], ids=["goes on", "forks"])
def test_memory_grows_with_what_is_said_and_not_with_its_square(tree: ConversationTree, ended: bool) -> None:
    said, sizes = [*ASKED], []
    tracemalloc.start()
    for turn in range(30):
        said += [answered(tree, tree.prompt(said), "It is 78.", ended=ended).messages[-1]]
        said += [Message("user", f"{turn}: {'pearl, ' * 500}")]
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[29] - sizes[19] < 3 * (sizes[9] - sizes[0])


def test_tools_are_kept_once_and_known_of_every_prompt(tree: ConversationTree) -> None:
    offers = [TOOLS, [], TOOLS[:1], TOOLS, []]
    for tools in offers:
        answered(tree, tree.prompt(ASKED, tools), "It is 78.")
    assert [offered_tools(tree.nodes, number) for number in range(5)] == offers
    assert [bool(node.offered) for node in tree.nodes] == [True, False, True, False, False]


def check(session: RandomSession, *, most: float = 1.2) -> tuple[int, int]:
    """Every delivered token is trained once, behind the tokens that it was sampled behind.

    Returns how many tokens are stored with replies, and how many distinct ones. `most` bounds their ratio.
    """
    nodes, wanted = session.tree.nodes, Counter[Any]()
    for number, reply in session.sampled.items():
        path = tokens_of(nodes, path_of(nodes, number)).token_ids.tolist()
        assert path == [*reply.prompt_ids, *reply.token_ids]
        if nodes[number].status == Status.TRAINED:
            wanted.update(_trained(reply.prompt_ids, reply.token_ids, reply.log_probs, [reply.version] * len(path)))
    found = Counter[Any]()
    for segment in segments_of(nodes, AUTHORS):
        tokens = segment.tokens
        ids, versions = tokens.token_ids.tolist(), tokens.policy_versions.tolist()
        for place in np.flatnonzero(tokens.authors == LLM):
            log_prob = tokens.behavior_log_probs[place].item()
            found[tuple(ids[:place]), ids[place], log_prob, versions[place]] += 1
        shown = tokens.authors != LLM
        assert np.isnan(tokens.behavior_log_probs[shown]).all() and (tokens.policy_versions[shown] == -1).all()
    assert found == wanted
    stored, distinct = sum(len(node.tokens) for node in nodes if node.num_sampled), _distinct(nodes)
    assert stored <= most * distinct
    return stored, distinct


def _trained(
    prompt: Sequence[int], ids: Sequence[int], log_probs: Sequence[float], versions: Sequence[int]
) -> Iterator[tuple[Any, ...]]:
    for place, (token, log_prob) in enumerate(zip(ids, log_probs, strict=True)):
        yield (*prompt, *ids[:place]), token, np.float32(log_prob).item(), versions[place]


def _distinct(nodes: Sequence[Node]) -> int:
    """Tokens of all paths, those that several have at their beginning counted once."""
    found: set[tuple[int, int]] = set()
    for node in nodes:
        before = 0
        for place, token in enumerate(tokens_of(nodes, path_of(nodes, node.number)).token_ids.tolist()):
            before = hash((before, token))
            found.add((place, before))
    return len(found)


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 2000), marks=SOAK)], ids=str)
def test_random_sessions_are_trained_once_and_exactly(seeds: range) -> None:
    for seed in seeds:
        check(random_session(seed))


def test_a_tree_of_the_stored_nodes_goes_on_as_the_one_that_made_them() -> None:
    def compare(session: RandomSession, messages: Sequence[Message], tools: Any) -> None:
        again = tree_of(session.model, nodes=session.tree.nodes)
        here, there = (tree.prompt(messages, tools) for tree in (session.tree, again))
        assert (here.ids, here.place, here.repeats) == (there.ids, there.place, there.repeats)
        assert here.messages == there.messages

    for seed in range(30):
        random_session(seed, asked=compare)


def instructed(message: Message, *instructions: str) -> Message:
    return replace(message, content=message.content + "".join(INSTRUCTION + text for text in instructions))


def test_instruction_that_the_agent_sends_back_without_is_no_fork(tree: ConversationTree) -> None:
    asked, more = [ASKED[0], instructed(ASKED[1], "Be brief.", "Call a tool.")], Message("user", "Sure?")
    first = answered(tree, tree.prompt(asked), "It  is 78.")
    back = [*ASKED, first.messages[-1], more]
    kept = tree.prompt([asked[0], instructed(ASKED[1], "Be brief."), *back[2:]])  # one instruction fewer
    later = [tree.prompt(back), kept, tree.prompt([*back[:-1], instructed(more, "Be brief.")])]
    assert [(prompt.place.parent, prompt.place.fork) for prompt in later] == [(0, None)] * 3
    assert [prompt.given[1] for prompt in later] == [asked[1]] * 3
    path = tokens_of(tree.nodes, path_of(tree.nodes, 0)).token_ids.tolist()
    assert all(prompt.ids[: len(path)] == path for prompt in later)
    other = tree.prompt([asked[0], instructed(ASKED[1], "In verse."), *back[2:]])
    assert other.place.fork == Fork.EDITED
    plain = answered(tree, tree.prompt(ASKED), "78.")  # its reply says that it was without
    places = [tree.prompt([*ASKED, node.messages[-1], more]).place for node in (first, plain)]
    assert [(place.parent, place.fork) for place in places] == [(0, None), (1, None)]


@pytest.mark.parametrize("put_back", ["", "</code>"])
def test_reply_that_a_text_ended_goes_on_by_its_tokens(tree: ConversationTree, put_back: str) -> None:
    stop = ("Observation:", "</code>")
    first = answered(tree, tree.prompt(ASKED, stop=stop), "Look:  x</code>", ended=False)
    assert first.messages[-1].content == "Look:  x"
    assert [tree.ended(0, texts) for texts in (stop, (), ("Look:",))] == [True, False, False]
    said = replace(first.messages[-1], content="Look:  x" + put_back)
    prompt = tree.prompt([*ASKED, said, Message("user", "It is 78.")], stop=stop)
    path = tokens_of(tree.nodes, path_of(tree.nodes, 0)).token_ids.tolist()
    assert (prompt.place.fork, prompt.ids[: len(path)], prompt.given[2].content) == (None, path, "Look:  x")
    text = family("chatml").codec.decode(prompt.ids)
    assert text.endswith("Look:  x</code><|im_end|>\n<|im_start|>user\nIt is 78.<|im_end|>\n<|im_start|>assistant\n")
