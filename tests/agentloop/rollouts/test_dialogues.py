"""Environments that answer back: random dialogues against what they must become, computed apart; and their mistakes."""

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from agentloop.config import RunConfig
from agentloop.environments import Task, load_environment
from agentloop.errors import UserError
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.episodes.run_episodes import run_episodes
from context import HermesParser, Message, Reply, default_authors, loss_mask
from context.messages import to_template
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.scripted import CHATML, CUT, call, scripted_actors

FILE = ENVIRONMENTS / "dialogue.py"
EXTERN = {
    "type": "function",
    "function": {
        "name": "math.add-1",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
}
TEMPLATE, RENDERER = CHATML.template, CHATML.renderer()
LOOK = load_environment(f"{FILE}:Dialogue", {}).tools[0]
TOOLS: list[Any] = [None, [], ["look"], [EXTERN], ["look", EXTERN]]
REPLIES = {
    "text": ["I think so."],
    "look": [call("look", '{"at": "box"}')],
    "extern": [call("math.add-1", '{"n": 2}')],
    "wrong": [call("math.add-1", '{"n": "two"}')],
    "both": [call("look", '{"at": "a"}') + "\n" + call("look", '{"at": "b"}')],
    "malformed": ['<tool_call>\n{"name": "look"'],
    "cut": ["I thin" + CUT],
}
GO_ON = {"say": "More.", "reward": None, "over": False}
SAID: list[Any] = [None, "And then?", "Go on.", ["One.", "Two."]]
KINDS = ("Dialogue", "Judged", "JudgedAtEveryEnd")


@dataclass
class Expected:
    """What an episode must become."""

    messages: list[Message]
    prompts: list[int] = field(default_factory=list)
    """Number of messages that each reply was given after."""
    sampled: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    stop: str = ""


def drawn(rng: random.Random) -> tuple[Task, list[str]]:
    steps = [
        {"say": rng.choice(SAID), "reward": rng.choice([None, None, 0.0, 0.25, -1.5]), "over": rng.random() < 0.1}
        for _ in range(rng.randint(0, 8))
    ]
    names = rng.choices(list(REPLIES), [6, 4, 4, 1, 2, 1, 1], k=10)
    payload = {"steps": steps, "tools": rng.choice(TOOLS)}
    return Task("Begin.", payload), [rng.choice(REPLIES[name]) for name in names]


def expected(episode: Episode, script: Sequence[str], config: RunConfig, lengths: Sequence[int]) -> Expected:
    """Follow the rules of the environment's methods, without the episode's code.

    The texts of errors are the episode's, and so are the `lengths` of its prompts in tokens: a rendering that is
    tokenised as a whole may be a few tokens shorter.
    """
    task, most = episode.task, config.context.max_tokens
    steps, found = iter(task.payload["steps"]), Expected([Message("user", "Begin.")])
    for number, text in enumerate(script, 1):
        is_last = number == config.rollout.max_turns
        found.prompts.append(len(found.messages))
        room = min(config.rollout.max_tokens_per_turn, most - lengths[number - 1])
        tokens = [*CHATML.codec.encode_text(text.removesuffix(CUT)), *([] if text.endswith(CUT) else [CHATML.end_id])]
        found.sampled += tokens[:room]
        is_whole = tokens[:room][-1] == CHATML.end_id
        reply = HermesParser().parse(CHATML.codec.decode(tokens[: room - is_whole or None]), stopped=is_whole)
        if is_whole:
            reply = HermesParser().parse(text, stopped=True)
        found.messages.append(reply.message)
        if reply.outcome == "truncated":
            return replace(found, stop="truncated")
        if reply.outcome == "final" and is_last:
            return replace(found, stop="max_turns")
        answers, over = answers_to(reply, steps, found, task)
        if answers is None:
            return replace(found, stop="answered")
        texts = iter(message.content for message in episode.messages[len(found.messages) :])
        answers = [replace(each, content=next(texts, "")) if each.content == "*" else each for each in answers]
        if over:
            return replace(found, stop="ended", messages=[*found.messages, *answers])
        if len(episode.messages) == len(found.messages) and episode.stop_reason == "context_full":
            unknown = any(answer.content == "" for answer in answers)  # nobody was shown the error
            assert unknown or lengths[number - 1] + len(tokens) + length(answers, task) >= most
            return replace(found, stop="context_full")
        found.messages += answers
        if is_last:
            return replace(found, stop="max_turns")
    raise AssertionError("the script was too short")


def answers_to(reply: Reply, steps: Iterator[Any], found: Expected, task: Task) -> tuple[list[Message] | None, bool]:
    """The environment's next answers (None: it takes the reply for the answer), and whether they end the episode."""
    names = {schema["function"]["name"] for schema in schemas(task)}
    if reply.outcome == "malformed":
        return [Message("tool", "*", name="error")], False
    if reply.outcome == "final":
        step = next(steps, GO_ON)
        if step["say"] is None and not step["over"]:
            return None, False
        found.rewards += [] if step["reward"] is None else [step["reward"]]
        said = step["say"] if isinstance(step["say"], list) else [step["say"]]
        return [Message("user", text) for text in said if text is not None], step["over"]
    answers: list[Message] = []
    for asked in reply.message.tool_calls:
        fits = asked.name == "look" or isinstance(asked.arguments.get("n"), int)
        if not (asked.name in names and fits):
            answers.append(Message("tool", "*", name=asked.name if asked.name in names else "unknown_tool"))
            continue
        step = next(steps, GO_ON)
        said = step["say"] if isinstance(step["say"], str) else "" if step["over"] else "Nothing."
        answers.append(Message("tool", said, name=asked.name))
        found.rewards += [] if step["reward"] is None else [step["reward"]]
        if step["over"]:
            return answers, True
    return answers, False


def schemas(task: Task) -> Any:
    offered = task.payload["tools"]
    return [LOOK] if offered is None else [LOOK if tool == "look" else tool for tool in offered]


def rendered(messages: Sequence[Message], task: Task) -> str:
    return TEMPLATE.render([*map(to_template, messages)], tools=schemas(task), generation_prompt=True)


def length(messages: Sequence[Message], task: Task) -> int:
    return len(RENDERER.tokens(RENDERER.render(messages, schemas(task))))


def check(episode: Episode, prompts: Sequence[str], kind: str, want: Expected) -> None:
    assert episode.stop_reason == want.stop
    said = [(m.role, m.content, m.name, m.tool_calls) for m in episode.messages]
    assert said == [(m.role, m.content, m.name, m.tool_calls) for m in want.messages]
    assert prompts == [rendered(episode.messages[:count], episode.task) for count in want.prompts]
    total, judged = math.fsum(want.rewards), len(want.stop) + len(want.messages) / 100
    is_judged = kind == "JudgedAtEveryEnd" or want.stop in ("answered", "ended")
    assert episode.environment_reward == (total if kind == "Dialogue" else judged if is_judged else 0.0)
    masks = [(segment.tokens.token_ids, loss_mask(segment.tokens, default_authors())) for segment in episode.segments]
    assert [token for ids, mask in masks for token in ids[mask].tolist()] == want.sampled


@pytest.mark.parametrize("kind", KINDS)
def test_random_dialogues_are_what_their_rules_make_of_them(kind: str) -> None:
    """2,100 episodes with calls, user turns, ends from inside, tools of tasks, rewards at each end, and every limit."""
    rng, stops, factory = random.Random(kind), dict[str, int](), load_environment(f"{FILE}:{kind}", {})
    for _ in range(7):
        limits = {"max_turns": rng.randint(2, 6), "max_tokens_per_turn": 200}
        config = RunConfig.model_validate({"rollout": limits, "context": {"max_tokens": rng.choice([260, 330, 4000])}})
        pairs, room = [drawn(rng) for _ in range(150)], config.context.max_tokens - 60
        fitting = [(task, script) for task, script in pairs if length(task.messages(), task) < room][:100]
        tasks, scripts = [task for task, _ in fitting], [script for _, script in fitting]
        actors = scripted_actors(factory, scripts)
        episodes = [*run_episodes(actors, [factory.labelled(task) for task in tasks], config)]
        for number, (episode, script) in enumerate(zip(episodes, scripts, strict=True)):
            want = expected(episode, script, config, actors.generator.lengths[number])
            check(episode, actors.generator.prompts[number], kind, want)
            stops[want.stop] = stops.get(want.stop, 0) + 1
    assert min(stops[reason] for reason in ("answered", "ended", "max_turns", "truncated", "context_full")) >= 10


MINE = """
from agentloop import Environment, Message, Observation, Task

class Mine(Environment):
    def make_task(self, rng):
        return Task("Begin.")

    def reward(self, task, messages):
        return 0.0

    def {}
"""
ACT = '{"type": "function", "function": {"name": "act", "parameters": %s}}'
RESPONDS = "respond(self, task, messages): return "
TOOLS_FOR = "tools_for(self, task): return "
RANDOM = "{'title': str(__import__('random').random())}"
NO_ANSWER = "must return a text, Messages, an Observation or None, got"
NO_TOOLS = "tools_for must be a list of names of"
MISTAKES = [
    (f"{RESPONDS}7", f"{NO_ANSWER} 7 for"),
    (f"{RESPONDS}[]", f"{NO_ANSWER} [] for"),
    (f"{RESPONDS}Message('assistant', 'I', author='llm')", "got others: messages.author must not be one whose tokens"),
    (f"{RESPONDS}Observation('x', reward=float('nan'))", "Observation.reward must be a finite number or None, got nan"),
    (f"{RESPONDS}Observation(None)", "Observation.content must be given while the episode goes on, got None. Show"),
    (f"{RESPONDS}task.payload['x']", "respond must answer any reply, got KeyError: 'x'"),
    (f"{TOOLS_FOR}'act'", f"{NO_TOOLS} tools, or of schemas"),
    (f"{TOOLS_FOR}{{'act'}}", f"{NO_TOOLS} tools, or of schemas in OpenAI's form, got {{'act'}}"),
    (f"{TOOLS_FOR}[{ACT % '{1}'}]", "tools_for: act must have a JSON form, got TypeError"),
    (
        f"{TOOLS_FOR}[{ACT % RANDOM}]\n    def call_tool(self, name, arguments): return 1",
        "make_task must make the same task from the same rng",
    ),
    (f"{RESPONDS}None\n    user = __import__('agentloop').ScriptedUser([])", "Mine.user must be set in start, got one"),
    (
        f"{TOOLS_FOR}[{ACT % '{}'}]",
        "must name tools that are known while there is no call_tool, got the schema of 'act",
    ),
    (f"{TOOLS_FOR}[{ACT % '7'}]", "act must have parameters that are a JSON schema, got 7"),
    (f"{TOOLS_FOR}[{ACT.replace('act', 'a t') % '{}'}]", "a t must be named in at most 64 of A-Z, a-z, 0-9, _, . and"),
]


@pytest.mark.parametrize(("method", "said"), MISTAKES)
def test_mistakes_of_authors_are_one_line(tmp_path: Path, method: str, said: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE.format(method))
    with pytest.raises(UserError) as raised:
        actors = scripted_actors(load_environment(f"{file}:Mine", {}), [["Yes."]])
        list(run_episodes(actors, [Task("Begin.")], RunConfig()))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


LONG = RunConfig.model_validate({"rollout": {"max_tokens_per_turn": 200}, "context": {"max_tokens": 4000}})


def test_functions_of_rows_answer_replies_and_the_calls_of_a_rows_own_tools(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def respond(task, messages):\n    return task.payload['more'] if len(messages) == 2 else None\n"
        "def call_tool(task, name, arguments):\n    return [name, arguments, task.payload['more']]\n"
        "def look(at: str) -> str:\n    '''Look.'''\n    return at\n"
    )
    answers = {name: f"{file}:{name}" for name in ("respond", "call_tool")}
    rows = [{"prompt": "Begin.", "more": "And?", "tools": tools} for tools in (json.dumps(["look"]), [EXTERN], None)]
    factory = load_environment("rows", {}, row=rows[0], tools=[f"{file}:look"], answers=answers)
    tasks = [factory.task_from_row(row, "row") for row in rows]
    scripts = [["Yes.", call("look", '{"at": "a"}'), "No."], [call("math.add-1", '{"n": 2}'), "Yes."], ["Yes.", "No."]]
    first, second, third = run_episodes(scripted_actors(factory, scripts), tasks, LONG)
    assert [message.content for message in first.messages] == ["Begin.", "Yes.", "And?", "", "a", "No."]
    assert [message.content for message in second.messages][2] == '["math.add-1", {"n": 2}, "And?"]'
    assert third.num_turns == 2
    assert [len(factory.tools_for(task)) for task in tasks] == [1, 1, 1]
    assert [factory.tools_for(task)[0]["function"]["name"] for task in tasks] == ["look", "math.add-1", "look"]
    assert len({factory.task_hash(task) for task in tasks}) == 3
    with pytest.raises(UserError, match=r"environment.respond must take \(task, messages\), got .*too many positional"):
        load_environment("rows", {}, row=rows[0], answers={"respond": f"{file}:look"})
