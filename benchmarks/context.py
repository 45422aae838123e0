"""CPU-seconds of the prompts of one episode: our context manager against rendering the whole conversation each turn.

The other way is what a user would write: `tokenizer.apply_chat_template` on all messages so far, once per turn. Both
see the same replies of 100 tokens and tool results of 1,900, no two of them alike, with the quickstart's template.
Ours also reads each reply, keeps log-probs and authors, and makes the episode's training sequence at the end.
"""

import json
import random
import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast

from agentloop.models.tiny import END_OF_TURN, build_tokenizer
from context import ChatTemplate, ContextManager, HermesParser, Message, Renderer, TokenCodec, ToolCall, default_authors
from context.messages import to_template

TURNS = (50, 200)
REPLY, RESULT = 100, 1900
GOALS = {"speedup_50": ">= 20", "speedup_200": ">= 60", "growth": "<= 5"}
_WORDS = 4000
_QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
_FUNCTION = {"name": "search", "description": "Search the archive.", "parameters": _QUERY}
SEARCH = {"type": "function", "function": _FUNCTION}


class Turn(NamedTuple):
    reply: Message
    reply_ids: list[int]
    result: Message


class Conversation(NamedTuple):
    """What both ways are given."""

    tokenizer: PreTrainedTokenizerFast
    codec: TokenCodec
    """Ours: one for all episodes, as `tokenizer` is, so that both have met the words before."""
    opening: tuple[Message, ...]
    turns: tuple[Turn, ...]


def make_conversation(turns: int, *, reply: int = REPLY, result: int = RESULT) -> Conversation:
    """`turns` tool calls and their results, of about so many tokens each; words as frequent as in real text (Zipf)."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(_WORDS)]
    ranks = list(accumulate(1 / rank for rank in range(1, _WORDS + 1)))

    def text(count: int) -> str:
        return " ".join(rng.choices(words, cum_weights=ranks, k=count))

    frame = [json.dumps(_FUNCTION), '{"name": "search", "arguments": {"query": "x"}}'] * 50
    tokenizer = build_tokenizer([text(2000) for _ in range(20)] + frame, vocabulary=4000)
    per_word = len(tokenizer.encode(text(2000))) / 2000
    made = []
    for _ in range(turns):
        call = ToolCall("search", {"query": text(round(0.2 * reply / per_word))})
        thought = text(round(0.8 * reply / per_word))
        said = Message("assistant", thought, tool_calls=(call,))
        ids = tokenizer.encode(_as_sampled(tokenizer, said), add_special_tokens=False)
        made.append(Turn(said, ids, Message("tool", text(round(result / per_word)), author="env", name="search")))
    codec = TokenCodec(tokenizer.backend_tokenizer.to_str())
    return Conversation(tokenizer, codec, (Message("user", text(30)),), tuple(made))


def _as_sampled(tokenizer: Any, reply: Message) -> str:
    """The reply as the policy would write it, up to its stop token."""
    asked = [{"role": "user", "content": "x"}]
    start = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*asked, to_template(reply)], tokenize=False)
    return str(whole).removeprefix(str(start)).removesuffix("\n")


def prompt_by_prompt(conversation: Conversation) -> tuple[float, list[int]]:
    """Ours: CPU-seconds, and the last prompt."""
    tokenizer, codec = conversation.tokenizer, conversation.codec
    stop = codec.token_id(END_OF_TURN)
    assert stop is not None
    template = ChatTemplate(str(tokenizer.chat_template), {})
    renderer = Renderer(codec, template, authors=default_authors(), stop_ids=frozenset([stop]))
    log_probs = [[-0.5] * len(turn.reply_ids) for turn in conversation.turns]
    fed = 0
    began = time.process_time()
    context = ContextManager(renderer, HermesParser(), max_tokens=1 << 30)
    context.begin(conversation.opening, [SEARCH])
    for turn, values in zip(conversation.turns, log_probs, strict=True):
        fed += len(context.prompt_ids[fed:])  # an engine with a cache is fed what is new
        context.record_reply(turn.reply_ids, values, policy_version=0)
        context.observe([turn.result])
    context.segments()
    return time.process_time() - began, list(context.prompt_ids)


def whole_each_turn(conversation: Conversation) -> tuple[float, list[int]]:
    """The other way: CPU-seconds, and the last prompt."""
    tokenizer: Any = conversation.tokenizer
    prompt = partial(tokenizer.apply_chat_template, tools=[SEARCH], add_generation_prompt=True, return_dict=False)
    messages = [to_template(message) for message in conversation.opening]
    replies = [(to_template(turn.reply), to_template(turn.result)) for turn in conversation.turns]
    began = time.process_time()
    ids: list[int] = prompt(messages)
    for pair in replies:
        messages += pair
        ids = prompt(messages)
    return time.process_time() - began, ids


def measure(turns: Sequence[int] = TURNS, *, rounds: int = 5, **tokens: int) -> dict[str, float]:
    """Medians over rounds: seconds of both ways by number of turns, their ratio, and how ours grows."""
    found: dict[str, float] = {}
    for count in turns:
        conversation = make_conversation(count, **tokens)
        ours = [prompt_by_prompt(conversation) for _ in range(rounds)]
        theirs = [whole_each_turn(conversation) for _ in range(1 if count > 100 else rounds)]  # half a minute each
        prompt = ours[0][1]
        # Not the same ids: a policy need not write a reply in the tokens that its text would be read as.
        if conversation.tokenizer.decode(prompt) != conversation.tokenizer.decode(theirs[0][1]):
            raise RuntimeError("both ways must make the same prompt, got two different texts.")
        found[f"seconds_{count}"] = statistics.median(taken for taken, _ in ours)
        found[f"tokens_{count}"] = float(len(prompt))
        found[f"speedup_{count}"] = statistics.median(taken for taken, _ in theirs) / found[f"seconds_{count}"]
    found["growth"] = found[f"seconds_{turns[-1]}"] / found[f"seconds_{turns[0]}"]
    return found


def main() -> dict[str, float]:
    return measure()
