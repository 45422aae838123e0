"""What an environment is: it makes tasks or reads them, offers tools, and rewards the whole conversation."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar, overload

from context.authors import DEMONSTRATION, INITIALIZATION, USER, default_authors
from context.messages import Message

_TOOL_MARK = "_agentloop_tool"
_LONGEST_EXCERPT = 60
_BUILT_IN_AUTHORS = frozenset(author.name for author in default_authors().authors) - {DEMONSTRATION}
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Task:
    """One thing to solve."""

    prompt: str | tuple[Message, ...]
    """The user's message, or the whole opening conversation.

    Nothing in it is trained on but assistant messages of an author that `context.authors` registers as trained.
    """
    payload: Mapping[str, Any] = field(default_factory=dict)
    """What tools and reward need to know (JSON values, whose keys come in any order); never shown to the policy."""
    hint: str | None = None
    """Help that the context strategy `hint` shows while the policy samples; others leave it out."""
    environment: str | None = None
    """Which of several environments it is of; the run says so, and None where it has one."""

    def messages(self) -> tuple[Message, ...]:
        """The opening conversation: the user's words by `user`, all else by `initialization`.

        A message keeps an author that the configuration can register.
        """
        if isinstance(self.prompt, str):
            return (Message("user", self.prompt, author=USER),)
        return tuple(
            replace(message, author=USER if message.role == "user" else INITIALIZATION)
            if message.author in _BUILT_IN_AUTHORS
            else message
            for message in self.prompt
        )


@dataclass(frozen=True)
class Achieved:
    """A task that the end of a conversation has solved, though another one was asked."""

    task: Task
    first_turn: int
    """The first reply of that end, from 0: it answers the prompt of `task`."""


def quoted_task(task: Task, messages: Sequence[Message] = ()) -> str:
    """A task, and the reply to it, for an error: `the task 'What is ...' and the reply '42'`, both cut short."""
    asked = f"the task {_excerpt(task.messages()[-1])}"
    return f"{asked} and the reply {_excerpt(messages[-1])}" if messages else asked


def _excerpt(message: Message) -> str:
    text = message.content or ", ".join(call.name for call in message.tool_calls)
    return repr(text if len(text) <= _LONGEST_EXCERPT else text[:_LONGEST_EXCERPT] + "...")


@overload
def tool(function: _Function) -> _Function: ...


@overload
def tool(*, isolated: bool = False, deterministic: bool = False) -> Callable[[_Function], _Function]: ...


def tool(
    function: _Function | None = None, *, isolated: bool = False, deterministic: bool = False
) -> _Function | Callable[[_Function], _Function]:
    """Offer a method of an `Environment` to the policy.

    Its JSON schema comes from its annotations and its docstring: the first paragraph describes the tool,
    `Args:` (or `:param name:`) its parameters. What it returns is shown: text as it is, anything else as JSON. An
    exception becomes an observation too.

    Tools of different episodes run at the same time: an `async def` on one event loop, any other in threads, so what
    episodes share must be safe there. A call that takes too long is left behind: its thread goes on until it returns,
    and while it holds the interpreter's lock, nothing else runs.
    `isolated=True` runs the tool in a forked process whose whole process group is killed afterwards: changes to
    `self` are lost, and a crash costs one call. It is no sandbox: the tool can do whatever the user can.

    `deterministic=True` says that its result follows from the task and the arguments alone, and that a call changes
    nothing: then it is not called twice with the same arguments for one task. See `Environment.deterministic`.
    """

    def mark(function: _Function) -> _Function:
        setattr(function, _TOOL_MARK, ToolMark(isolated, deterministic))
        return function

    return mark if function is None else mark(function)


@dataclass(frozen=True)
class ToolMark:
    """What the author of a tool says of it."""

    isolated: bool
    deterministic: bool


def tool_mark(method: object) -> ToolMark | None:
    """None for what is no tool."""
    # A staticmethod or classmethod may carry the mark itself or on what it wraps.
    marks = (getattr(carrier, _TOOL_MARK, None) for carrier in (method, getattr(method, "__func__", None)))
    return next((mark for mark in marks if isinstance(mark, ToolMark)), None)


class Environment:
    """Base class of environments. One instance lives for one episode, so `self` may hold the episode's state.

    The constructor's keyword arguments are the configuration's `environment.options`. Keep it cheap: load
    data once, in a function with `functools.cache`.
    """

    version: ClassVar[str] = "1"
    """Raise it when tools or rewards change their meaning; stored with every trajectory."""

    one_thread: ClassVar[bool] = False
    """True: one thread calls all that an instance does, its own; for connections that other threads may not use."""

    deterministic: ClassVar[bool] = False
    """True: every tool's result follows from the task and the calls before it in the episode. It is remembered, and a
    call that is made again after the same calls for the same task is answered without running the tool; what was left
    out is made up for before the next call that runs. `reward` must then go by task and messages, not by what tools
    left in `self`. `agentloop replay verify --tools` tries whether it is true."""

    def make_task(self, rng: random.Random) -> Task:
        """A random task, the same one for the same state of `rng`. Not needed where every task is a row."""
        raise NotImplementedError

    def task_from_row(self, row: Mapping[str, Any]) -> Task:
        """The task that a row of `tasks.data` stands for, the same one for the same row."""
        raise NotImplementedError

    def start(self, task: Task) -> Awaitable[None] | None:
        """Set up this episode's state; may be `async def`."""
        return None

    def close(self) -> Awaitable[None] | None:
        """Free what `start` and tools took hold of: connections, processes, files; may be `async def`.

        Called once of each instance whose `start` was called, also where that raised, when its episode has ended in
        whatever way; a tool call that was left behind may still run. One that raises, or takes longer than
        `rollout.tool_timeout_s`, costs nothing: it is counted and warned of.
        """
        return None

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        """The reward of the whole conversation: a finite number, whatever the policy wrote."""
        raise NotImplementedError

    def turn_rewards(self, task: Task, messages: Sequence[Message]) -> Sequence[float] | None:
        """What each reply of the policy earned by itself, besides `reward`: one finite number per reply, in order.

        None: this environment does not say. Asked of an instance that has played no episode, as `messages` and the
        task's payload are all there is of a stored one; the task's prompt is then its opening messages. Used with
        `advantage.credit: turn` only.
        """
        return None

    def achieved(self, task: Task, messages: Sequence[Message]) -> Sequence[Achieved]:
        """Other tasks that this conversation, which failed at `task`, has in fact solved; none where it is not said.

        What the tools answered from `first_turn` on must be what they would have answered for the new task. Asked of an
        instance that has played no episode, as `turn_rewards` is, with `replay.hindsight.enable` only. Each is taken
        only if `reward` of the new task and that end, asked of an instance that was started with the new task, is a
        success (Andrychowicz et al. 2017, arXiv 1707.01495).
        """
        return ()

    def demonstrate(self, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
        """The next reply of a scripted demonstrator, which the warm-up of the built-in model imitates."""
        raise NotImplementedError
