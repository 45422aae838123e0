"""Scripted episodes over any template, and the laws that hold for what they leave behind."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from context import ContextManager, Message, Renderer, Reply, Segment, TokenSequence, ToolCall, loss_mask, response_mask
from context.authors import ENV, HISTORY, TEMPLATE
from context.parse import KnownReply
from context.templates.chat_template import LOOKUP

TOOLS = [LOOKUP]


class ScriptedParser(KnownReply):
    """Reads every reply as the message that it is given: what ids mean is not what these episodes are about."""

    def parse(self, text: str, *, stopped: bool) -> Reply:
        cut = Reply("truncated", Message("assistant", text, "llm"), None)
        return super().parse(text, stopped=stopped) if stopped else cut


@dataclass
class Turn:
    """A scripted reply and what the environment says to it."""

    ids: list[int]
    """Without a stop token."""
    content: str
    reasoning: str | None
    arguments: dict[str, str] | None
    """None: the reply calls no tool."""
    result: str


@dataclass
class Call:
    """What the generator was given, and what it sampled."""

    prompt: list[int]
    sampled: list[int]
    question: bool


@dataclass
class Episode:
    context: ContextManager
    parser: ScriptedParser
    stop: int
    answer: Callable[[int], str] = lambda number: f"note {number}"
    """The text of the policy's answer to the strategy's n-th question."""
    calls: list[Call] = field(default_factory=list)
    questions: int = 0
    stop_reason: str | None = None

    def play(self, turns: Sequence[Turn], *, tool_role: bool) -> None:
        for number, turn in enumerate(turns):
            self._settle()
            if self.stop_reason is None and self.context.room <= len(turn.ids):
                self.stop_reason = "context_full"
            if self.stop_reason is not None:
                return
            call_id = f"call{number:05d}"
            called = () if turn.arguments is None else (ToolCall("lookup", turn.arguments, call_id),)
            self._say(turn.ids, Message("assistant", turn.content, "llm", called, reasoning=turn.reasoning))
            result = Message("user", turn.result, ENV)
            if tool_role and called:
                result = Message("tool", turn.result, ENV, name="lookup", tool_call_id=call_id)
            self.stop_reason = self.context.observe([result])
        self._settle()

    def _settle(self) -> None:
        """Answer the strategy's question, if it has one."""
        if self.stop_reason is None and self.context.question:
            self.questions += 1
            answer = Message("assistant", self.answer(self.questions), "llm")
            assert self._say([200 + self.questions % 50], answer).outcome == "question"
            self.stop_reason = self.context.stopped

    def _say(self, ids: list[int], message: Message) -> Reply:
        self.parser.message, ids = message, [*ids, self.stop]
        self.calls.append(Call(list(self.context.prompt_ids), ids, self.context.question is not None))
        return self.context.record_reply(ids, [-0.25] * len(ids), policy_version=0)


def laws(episode: Episode, renderer: Renderer, *, hinted: bool = False) -> None:
    """What holds for every episode, whatever the template and the strategy."""
    authors, controls = renderer.authors, renderer.codec.added_ids
    segments = episode.context.segments()
    remaining = iter(episode.calls)
    said: list[int] = []
    for number, segment in enumerate(segments):
        tokens = segment.tokens
        action, trained = response_mask(tokens, authors), loss_mask(tokens, authors)
        assert not (trained & ~action).any()
        sampled = authors.has_behavior(tokens.authors)
        assert not (sampled & ~action).any()
        assert (np.isnan(tokens.behavior_log_probs) == (~sampled | hinted)).all()
        assert ((tokens.policy_versions >= 0) == sampled).all()
        contents = ~action & (tokens.authors != authors.code(TEMPLATE))
        again = contents & (tokens.authors == authors.code(HISTORY))  # as it was sampled, with its stop token
        assert controls.isdisjoint(tokens.token_ids[contents & ~again].tolist())
        assert controls.isdisjoint(set(tokens.token_ids[again].tolist()) - {episode.stop})
        said += tokens.token_ids[sampled].tolist()
        if hinted:
            assert segment.behavior_context == "hinted"
        else:
            _given_what_is_trained(tokens, sampled, remaining)
        assert (segment.reason == "clean") == (number == 0)
    assert next(remaining, None) is None or hinted
    assert said == [token for call in episode.calls for token in call.sampled]


def _given_what_is_trained(tokens: TokenSequence, sampled: np.ndarray, calls: Iterator[Call]) -> None:
    """Every sampled stretch of a segment follows exactly the prompt its generator was given."""
    ids = tokens.token_ids.tolist()
    at = 0
    while sampled[at:].any():
        call = next(calls)
        start = len(call.prompt)
        end = start + len(call.sampled)
        assert ids[:start] == call.prompt
        assert ids[start:end] == call.sampled
        assert sampled[start:end].all() and not sampled[at:start].any()
        at = end


def texts(segment: Segment, renderer: Renderer, author: str) -> str:
    tokens = segment.tokens
    return renderer.codec.decode(tokens.token_ids[tokens.authors == renderer.authors.code(author)].tolist())


ASKED = (Message("user", "What is asked?"),)
