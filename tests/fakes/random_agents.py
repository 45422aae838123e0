"""Agents that do what people's programs were seen to do with a conversation: each session from its own seed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from context import Message, RenderError, ToolCall, choose_parser
from context.conversation_tree import ConversationTree
from context.tokens.session_nodes import Node, Status
from tests.fakes.families import Family, family

PARSERS = {"chatml": "hermes", "llama3": "llama3_json", "mistral": "mistral"}
TODAY = datetime(2026, 1, 1)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} a record",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}, "depth": {"type": "integer"}}},
        },
    }
    for name in ("lookup", "search")
]


@dataclass
class RandomAgent:
    """Keeps some conversations, and changes them the way that programs do between two requests."""

    rng: random.Random
    conversations: list[list[Message]] = field(default_factory=list)
    ids: str = field(init=False)
    """What it names calls by."""

    def __post_init__(self) -> None:
        self.ids = self.rng.choice(["given", "each turn again", "own"])

    def request(self) -> tuple[list[Message], list[dict[str, Any]], int]:
        """Messages, tools, and the number of their conversation."""
        rng = self.rng
        if not self.conversations or rng.random() < 0.08:
            self._begin()
        number = rng.randrange(len(self.conversations))
        said = self.conversations[number]
        if said[-1].role == "assistant":
            self._go_on(said)
        if rng.random() < 0.1:
            self._tamper(said)
        return list(said), [] if rng.random() < 0.04 else TOOLS, number

    def hear(self, number: int, reply: Message) -> None:
        """Keep a reply in its conversation."""
        said = self.conversations[number]
        turn = 0 if self.ids == "each turn again" else len(said)
        calls = (replace(call, id=f"call_{turn}_{place}") for place, call in enumerate(reply.tool_calls))
        said.append(reply if self.ids == "given" else replace(reply, tool_calls=tuple(calls)))

    def refused(self, number: int) -> None:
        """Say more in a conversation that got no reply, or begin it again."""
        if self.rng.random() < 0.5:
            self.conversations[number].append(Message("user", "Shorter, then."))
        else:
            del self.conversations[number][2:]

    def _begin(self) -> None:
        system = self.rng.choice(["You look things up.", "You plan.", "Say a title."])
        said = [Message("system", system), Message("user", self.rng.choice(["Find pearl.", "Find coral."]))]
        if self.rng.random() < 0.2:  # an example that nobody sampled
            said += [Message("assistant", "For example so."), Message("user", "Go on.")]
        self.conversations.append(said)

    def _go_on(self, said: list[Message]) -> None:
        calls = said[-1].tool_calls
        results = [Message("tool", self.rng.choice(["78", '{"next": "arrow"}', ""]), tool_call_id=c.id) for c in calls]
        if self.rng.random() < 0.3:
            self.rng.shuffle(results)
        said += results or [Message("user", self.rng.choice(["And then?", "Go on.", "Are you sure?"]))]

    def _tamper(self, said: list[Message]) -> None:
        way = self.rng.choice(["edit", "inject", "strip", "compact", "back", "reorder"])
        ours = [at for at, message in enumerate(said) if message.role == "assistant"]
        if way == "edit":
            at = self.rng.choice([at for at, message in enumerate(said) if message.role == "user"])
            said[at] = replace(said[at], content=f"{said[at].content} (edited)")
        elif way == "inject":
            said += [Message("assistant", "Let me think."), Message("user", "Yes.")]
        elif way == "strip" and ours:
            said[ours[-1]] = replace(said[ours[-1]], reasoning=None)
        elif way == "compact":
            said[1:] = [Message("user", "So far: nothing was found. Go on.")]
        elif way == "back" and len(ours) > 1:
            del said[ours[-1] :]
        elif way == "reorder" and ours:
            calls = [_reordered(call) for call in said[ours[-1]].tool_calls]
            said[ours[-1]] = replace(said[ours[-1]], tool_calls=tuple(calls))


def _reordered(call: ToolCall) -> ToolCall:
    return replace(call, arguments={"by_default": 1, **dict(reversed(list(call.arguments.items())))})


@dataclass(frozen=True)
class SampledReply:
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    version: int


def sampled_reply(
    rng: random.Random, model: Family, prompt_ids: Sequence[int], version: int, *, mark: str = ""
) -> SampledReply:
    """Whatever a policy may say: calls, several of them, answers, thoughts, broken calls, nothing, too much. Each with
    a mark, by which it is told from others."""
    thought = rng.choice(["", "", "<think>\nhm, pearl\n</think>\n\n"])
    call, deep = (model.call.replace('"pearl"', f'"{key}') for key in (f'pearl{mark}"', f'coral{mark}", "depth": 3'))
    calls = [call, deep, f"{call}\n{deep}", f"I look. {deep}"]
    answers = [f"It is 78{mark}.", f'<tool_call>{{"oops{mark}', f" a  b {mark}", mark]
    ids = model.codec.encode(thought + rng.choice([*calls, *answers]))
    ids = [*ids, model.end_id] if rng.random() > 0.05 or not ids else ids
    return SampledReply(prompt_ids, ids, [-rng.random() for _ in ids], version)


@dataclass
class RandomSession:
    """A session of one agent with what was sampled in it, by node."""

    model: Family
    tree: ConversationTree
    sampled: dict[int, SampledReply] = field(default_factory=dict)
    given: list[int] = field(default_factory=list)
    """Nodes whose replies the agent was given, in the order of time."""


Asked = Callable[[RandomSession, Sequence[Message], Any], None]


def tree_of(model: Family, **given: Any) -> ConversationTree:
    parser = choose_parser(PARSERS[model.name], model.template)
    return ConversationTree(model.renderer(), lambda tools: parser, now=TODAY, **given)


def random_session(
    seed: int, *, asked: Asked = lambda *_: None, before: Callable[[RandomSession], None] = lambda _: None
) -> RandomSession:
    """`asked` is called with the session, the messages and the tools of each request before it is answered; `before`
    with the session before each request, to which it may give another tree."""
    rng, model = random.Random(seed), family(tuple(PARSERS)[seed % len(PARSERS)])
    agent, session = RandomAgent(rng), RandomSession(model, tree_of(model))
    for version in range(rng.randint(1, 14)):
        before(session)
        tree = session.tree
        messages, tools, conversation = agent.request()
        try:
            prompt = tree.prompt(messages, tools)
        except RenderError:  # Mistral's knows no two assistants in a row
            agent.refused(conversation)
            continue
        asked(session, messages, tools)
        number = prompt.repeats
        if number is None:
            reply = sampled_reply(rng, model, prompt.ids, version)
            node, _ = tree.add(prompt, reply.token_ids, reply.log_probs, policy_version=version)
            session.sampled[node.number], number = reply, node.number
        if rng.random() < 0.1:
            continue  # the agent has hung up
        tree.delivered(number)
        session.given.append(number)
        said, ids = tree.nodes[number].messages[-1], tree.call_ids(number)
        calls = [replace(call, id=id) for call, id in zip(said.tool_calls, ids, strict=True)]
        agent.hear(conversation, replace(said, tool_calls=tuple(calls)))
    return session


def planned_session() -> list[Node]:
    """A planner with a sub-agent between its requests, which then begins again from a summary; what it asked aside, a
    reply that it never got, and a prompt that had no room."""
    tree, model = tree_of(family("chatml")), family("chatml")
    asked = [Message("system", "You plan."), Message("user", "Find pearl.")]
    searching = [Message("system", "You look things up."), Message("user", "Where is pearl?")]

    def ask(said: list[Message], text: str, agent: str = "planner", status: Status = Status.UNDELIVERED) -> None:
        ids = [*model.codec.encode(text), model.end_id]
        node, reply = tree.add(tree.prompt(said), ids, [-0.5] * len(ids), policy_version=0, agent=agent, status=status)
        if agent != "gone":
            tree.delivered(node.number)
        said += [reply.message, Message("user", "Go on.")]

    ask(asked, "I ask.")
    ask(asked, "I ask again.")
    ask(searching, "It is 78.", "searcher")
    ask(asked, "78, then.")
    ask([asked[0], Message("user", "So far: 78. Go on.")], "The code is 78.")
    ask([Message("user", "A title?")], "Pearl.", status=Status.ASIDE)
    ask([Message("user", "Still there?")], "Yes.", "gone")
    tree.refuse(tree.prompt([Message("user", "Too long")]), agent="searcher")
    return tree.nodes
