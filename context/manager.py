"""The one object that a rollout talks to: it has the exact tokens of an episode, and who wrote each."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from context.authors import HISTORY
from context.messages import Message, admitted, numbered_calls, shown_messages
from context.parse import Reply, ReplyParser
from context.strategies import Linear, Strategy
from context.strategies.protocol import (
    CONTEXT_FULL,
    UNRENDERABLE,
    Answer,
    Append,
    History,
    Question,
    Rewrite,
    Stop,
    Turn,
    shown,
)
from context.templates.chat_template import RenderError
from context.templates.render import Renderer
from context.templates.rendering.conversation_writer import Rendering
from context.templates.rendering.reply_end import Sampled
from context.tokens.loss_mask import behind_the_end, mark_untrained
from context.tokens.token_sequence import Segment, SegmentReason, TokenSequence
from context.tokens.training_sequence import OpenSegment, sampled_tokens

_Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class _Next:
    """The next prompt if the strategy changes nothing."""

    view: tuple[Message, ...]
    grown: Rendering
    increment: TokenSequence | None
    """The tokens that follow the reply. None: the template rewrites earlier text."""
    length: int


class ContextManager:
    """The conversation of an episode as exact tokens: a prompt extends the one before, and nothing is tokenised again.

    If the template or the strategy rewrites earlier text, a new segment begins. It shows the policy's earlier replies
    with author `history`. So each sampled token is trained once, in the context in which it was sampled. One object
    serves one episode: `begin`, then `record_reply` and `observe` in turn.
    """

    def __init__(
        self,
        renderer: Renderer,
        parser: ReplyParser,
        *,
        max_tokens: int,
        strategy: Strategy | None = None,
        untrained_turns: Collection[int] = (),
    ) -> None:
        """Replies of `untrained_turns`, which count from 0, are shown and not trained."""
        self._renderer = renderer
        self._parser = parser
        self._max_tokens = max_tokens
        self._strategy = strategy or Linear()
        self._untrained_turns = untrained_turns
        self._tools: _Tools = ()
        self._hint: str | None = None
        self._segments: list[OpenSegment] = []
        self._current: OpenSegment | None = None
        self._messages: list[Message] = []
        self._view: tuple[Message, ...] = ()
        """The messages that the next prompt shows."""
        self._shown: Rendering | None = None
        """The last prompt for a turn of the episode."""
        self._prompt: Rendering | None = None
        """The prompt for the next reply: a turn, or the answer to a strategy's question."""
        self._rendered: tuple[Sequence[Message], _Tools, Rendering, TokenSequence] | None = None
        """The last prompt that was rendered whole."""
        self._num_turns = 0
        self._last: Reply | None = None
        """The reply that waits for an observation. None: the policy is to speak."""
        self._said = Sampled("", None)
        self._num_calls = 0
        self._asked: tuple[Question, _Next] | None = None
        """The question that waits for its answer, and the prompt that was to follow."""
        self.rewrites: Counter[str] = Counter()
        """How often the view was rewritten, by the strategy's kind of change, or as `template_rewrite`."""
        self.stopped: str | None = None
        """Why the episode can't go on. None: it can."""
        self.problem: str | None = None
        """The template's refusal in words. None: `stopped` is not `unrenderable`."""

    def begin(self, messages: Sequence[Message], tools: _Tools | None = None, *, hint: str | None = None) -> None:
        """Makes the first prompt of the messages, among which there may be few-shot replies.

        An action author's message is a reply in the policy's place. It is trained here if its author is, without
        log-probs, and later segments show it as `history`. A `hint` is left out but by the strategy that shows it.
        """
        if self._segments:
            raise RuntimeError("begin must be called once. Make a ContextManager per episode.")
        if not messages:
            raise ValueError("messages must hold at least one message, got none.")
        self._tools, self._hint = tools or (), hint
        authors = self._renderer.authors
        given = admitted(messages, authors, opening=True)
        view = shown_messages(given, authors)
        self._open(view, view if hint is None else self._strategy.hinted(view, hint), "clean", self._tools)
        self._view = tuple(self._as_history(view))
        self._messages += given

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The exact tokens of the next prompt. The returned list does not change later."""
        return self._current.ids if self._current else ()

    @property
    def prompt(self) -> Rendering:
        """The prompt for the next reply, as the template writes it."""
        if self._prompt is None:
            raise RuntimeError("begin must be called first.")
        return self._prompt

    @property
    def room(self) -> int:
        """Tokens left for a reply under `max_tokens` or the question's own limit. Below 1, no reply fits."""
        left = self._max_tokens - len(self._current or ())
        return min(left, self._asked[0].max_answer_tokens) if self._asked else left

    @property
    def question(self) -> Question | None:
        """The strategy's question that the next reply answers. None: the next reply is a turn of the episode."""
        return self._asked[0] if self._asked else None

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, for people, rewards and storage. A strategy's questions are left out."""
        return tuple(self._messages)

    def record_reply(
        self, token_ids: Sequence[int], log_probs: Sequence[float], *, policy_version: int | Sequence[int]
    ) -> Reply:
        """Appends what the policy sampled, verbatim, and reads it.

        `policy_version` is one for all tokens, or one per token where the weights changed while they were sampled.
        There is one log-prob per token, in nats; all are NaN for a demonstration, which no known policy sampled. A
        reply without a stop token was cut by a length limit: it is `truncated`, and no end is added. The outcome
        `question` answers the strategy's question: sample again, unless `stopped` says why not.
        """
        if self._current is None or self._last is not None or self.stopped is not None:
            raise RuntimeError("record_reply must follow begin or observe.")
        token_ids = [*map(int, token_ids)]  # arrays and tensors are equal to nothing
        if not 1 <= len(token_ids) <= self.room:
            raise ValueError(f"token_ids must hold 1 to {self.room} tokens (the room left), got {len(token_ids)}.")
        renderer = self._renderer
        sampled = sampled_tokens(token_ids, log_probs, policy_version, authors=renderer.authors)
        author = renderer.authors.name(int(sampled.authors[0]))
        sampled = mark_untrained(sampled, behind_the_end(token_ids, renderer.end_ids), renderer.authors)
        said, ended = self._renderer.said(token_ids)
        reply = self._parser.parse(self.prompt.opened_thought + said.text, stopped=ended)
        if self._asked is not None:
            return self._take_answer(reply, sampled)
        self._current.say(sampled, turn=self._num_turns)
        self._num_turns += 1
        self._said = said
        calls = reply.message.tool_calls
        if renderer.template.needs_call_ids:
            calls = numbered_calls(calls, self._num_calls)
            self._num_calls += len(calls)
        reply = replace(reply, message=replace(reply.message, author=author, tool_calls=calls))
        self._messages.append(reply.message)
        self._view = (*self._view, reply.message)
        self._last = reply
        return reply

    def observe(self, messages: Sequence[Message]) -> str | None:
        """Puts tool results, or other messages that follow a reply, into the next prompt.

        Returns None: sample the next reply, which may answer a question of the strategy. Or returns why the episode
        can't go on: `context_full`, `unrenderable`, or a reason of the strategy's. Then nothing was appended or lost.
        """
        if self._last is None or self._last.outcome == "truncated":
            raise RuntimeError("observe must follow a reply that ended its turn.")
        given = admitted(messages, self._renderer.authors, opening=False)
        self._go_on(lambda: self._following(given), None)
        if self.stopped is None:
            self._messages += given
            self._last = None
        return self.stopped

    def reward_reply(self, reward: float) -> None:
        """Notes the reward of the reply that waits for an observation. It is stored, and no prompt shows it."""
        if self._last is None:
            raise RuntimeError("reward_reply must follow record_reply.")
        self._messages[-1] = replace(self._messages[-1], reward=reward)

    def end(self, messages: Sequence[Message]) -> None:
        """Stores what was said after the last reply of an episode that is over. No prompt will show it."""
        self._messages += admitted(messages, self._renderer.authors, opening=False)

    def segments(self) -> tuple[Segment, ...]:
        """The training sequences so far, in the order of time. Prompts without a reply are left out."""
        authors = self._renderer.authors
        return tuple(
            segment.closed(self._untrained_turns, authors)
            for index, segment in enumerate(self._segments)
            if segment.has_replies or index == 0
        )

    def _take_answer(self, reply: Reply, sampled: TokenSequence) -> Reply:
        assert self._asked is not None and self._current is not None
        question, following = self._asked
        if not question.train_answers:
            sampled = mark_untrained(sampled, np.ones(len(sampled), bool), self._renderer.authors)
        self._current.say(sampled, turn=None)
        self._asked = None
        answer = Answer(reply.message.content, reply.outcome == "truncated")
        # The answer stands in a segment of its own, so that the next prompt begins another one.
        self._go_on(lambda: replace(following, increment=None), answer)
        return Reply("question", reply.message, None)

    def _go_on(self, following: Callable[[], _Next], answer: Answer | None) -> None:
        """Makes the next prompt as the strategy wants it, or sets `stopped`."""
        self.problem = None
        try:
            self.stopped = self._arrange(following(), answer)
        except RenderError as error:
            # The policy would not see what was said: the template cuts, moves or refuses it.
            self.stopped, self.problem = UNRENDERABLE, str(error)

    def _following(self, given: Sequence[Message]) -> _Next:
        added = shown_messages(given, self._renderer.authors)
        try:
            return self._extended((*self._view, *added))
        except RenderError:
            called = self._last is not None and self._last.message.tool_calls
            if called or all(message.role != "tool" for message in added):
                raise
            # Some templates take a tool's result behind a call only. There, the answer to a call that could not be
            # read is shown as a user's message.
            as_users = [replace(m, role="user", name=None, tool_call_id=None) if m.role == "tool" else m for m in added]
            return self._extended((*self._view, *as_users))

    def _extended(self, view: tuple[Message, ...]) -> _Next:
        assert self._shown is not None
        grown = self._renderer.render(self._hinted(view), self._tools, after=self._shown)
        increment = self._renderer.increment(self._shown, grown, self._said)
        length = self._measure(view) if increment is None else len(self._current or ()) + len(increment)
        return _Next(view, grown, increment, length)

    def _arrange(self, following: _Next, answer: Answer | None) -> str | None:
        """Makes the next prompt as the strategy wants it. Returns why it can't be made, or None."""
        history = History(
            *self._turns(following.view),
            prompt_tokens=following.length,
            max_tokens=self._max_tokens,
            measure=self._measure,
            count=self._renderer.count,
            answer=answer,
        )
        arrangement = self._strategy.arrange(history)
        if isinstance(arrangement, Stop):
            return arrangement.reason
        if isinstance(arrangement, Question):
            if answer is not None:
                raise RuntimeError("strategy.arrange must decide once its question is answered, got another question.")
            return self._ask(arrangement, following)
        if isinstance(arrangement, Append) and answer is None:
            return self._append(following)
        wanted = Rewrite(following.view, "asked") if isinstance(arrangement, Append) else arrangement
        return self._rewrite(wanted, following)

    def _ask(self, question: Question, following: _Next) -> str | None:
        if self._measure(question.messages, tools=False) >= self._max_tokens:
            return CONTEXT_FULL
        self._reopen(question.messages, "fork", ())
        self._asked = question, following
        return None

    def _append(self, following: _Next) -> str | None:
        if following.length >= self._max_tokens:
            return CONTEXT_FULL
        if following.increment is None:
            self._reopen(following.view, "template_rewrite", self._tools)
            self.rewrites["template_rewrite"] += 1
        else:
            assert self._current is not None
            self._current.show(following.increment)
            self._shown = self._prompt = following.grown
        self._view = following.view
        return None

    def _rewrite(self, arrangement: Rewrite, following: _Next) -> str | None:
        if following.increment is not None and arrangement.messages[: len(self._view)] == self._view:
            # The strategy changes unseen messages alone, so that the prompt still extends the last one.
            problem = self._append(self._extended(arrangement.messages))
            if problem is not None:
                return problem
        elif self._measure(arrangement.messages) >= self._max_tokens:
            return CONTEXT_FULL
        else:
            self._reopen(arrangement.messages, "strategy_rewrite", self._tools)
            self._view = arrangement.messages
        self.rewrites[arrangement.kind] += 1
        return None

    def _reopen(self, view: tuple[Message, ...], reason: SegmentReason, tools: _Tools) -> None:
        """Begins a segment that shows `view`, and trains no earlier reply."""
        self._open(self._as_history(view), self._as_history(self._hinted(view)), reason, tools)

    def _open(self, plain: Sequence[Message], seen: Sequence[Message], reason: SegmentReason, tools: _Tools) -> None:
        """Begins a segment. `plain` is trained on; the policy sees `seen`, which may hold a hint."""
        rendering, trained = self._render(plain, tools)
        hinted = None
        if seen != plain:
            rendering, hinted = self._render(seen, tools)
        self._current = OpenSegment(trained, hinted, reason=reason)
        self._segments.append(self._current)
        self._prompt = rendering
        if reason != "fork":
            self._shown = rendering

    def _measure(self, messages: Sequence[Message], *, tools: bool = True) -> int:
        return len(self._render(self._as_history(self._hinted(tuple(messages))), self._tools if tools else ())[1])

    def _render(self, messages: Sequence[Message], tools: _Tools) -> tuple[Rendering, TokenSequence]:
        """Render the whole prompt of these messages. The last prompt is cached, because a measured prompt is often
        shown next."""
        if self._rendered is None or self._rendered[:2] != (messages, tools):
            rendering = self._renderer.render(messages, tools, after=self._shown)
            self._rendered = messages, tools, rendering, self._renderer.tokens(rendering)
        return self._rendered[2:]

    def _hinted(self, view: tuple[Message, ...]) -> tuple[Message, ...]:
        if self._hint is None:
            return view
        opening, turns = self._turns(view)
        return shown(self._strategy.hinted(opening, self._hint), turns)

    def _turns(self, view: Sequence[Message]) -> tuple[tuple[Message, ...], tuple[Turn, ...]]:
        """The messages before the first reply, and the replies with their results."""
        cuts = [*(place for place, message in enumerate(view) if self._is_action(message.author)), len(view)]
        turns = tuple(Turn(view[start], tuple(view[start + 1 : end])) for start, end in pairwise(cuts))
        return tuple(view[: cuts[0]]), turns

    def _as_history(self, view: Sequence[Message]) -> list[Message]:
        return [replace(row, author=HISTORY) if self._is_action(row.author) else row for row in view]

    def _is_action(self, author: str) -> bool:
        return self._renderer.authors.author(author).action
