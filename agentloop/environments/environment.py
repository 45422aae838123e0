"""What an environment is: it makes tasks or reads them, offers tools, and rewards the whole conversation."""

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar, overload

from context.authors import DEMONSTRATION, INITIALIZATION, USER, default_authors
from context.messages import Message
from context.wording import excerpt

_TOOL_MARK = "_agentloop_tool"
_LONGEST_EXCERPT = 60
_BUILT_IN_AUTHORS = frozenset(author.name for author in default_authors().authors) - {DEMONSTRATION}
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Task:
    prompt: str | tuple[Message, ...]
    """The user's message, or an opening conversation; trained on are messages of authors registered as trained."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """What tools and reward need to know (JSON values, whose keys come in any order); never shown to the policy."""
    hint: str | None = None
    """Help that the context strategy `hint` shows while the policy samples; others leave it out."""
    environment: str | None = None
    """Which of several environments it is of; the run says so, and None where it has one."""

    def messages(self) -> tuple[Message, ...]:
        """The opening conversation, by `user` and `initialization` where no author of `context.authors` is named."""
        if isinstance(self.prompt, str):
            return (Message("user", self.prompt, author=USER),)
        return tuple(
            replace(message, author=USER if message.role == "user" else INITIALIZATION)
            if message.author in _BUILT_IN_AUTHORS
            else message
            for message in self.prompt
        )


@dataclass(frozen=True, kw_only=True)
class StoredTask(Task):
    """A task that was read back from the buffer, where a hint that `hash` counts is not stored."""

    hash: str


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
    return repr(excerpt(text, _LONGEST_EXCERPT))


@overload
def tool(function: _Function) -> _Function: ...


@overload
def tool(*, isolated: bool = False, deterministic: bool = False) -> Callable[[_Function], _Function]: ...


def tool(
    function: _Function | None = None, *, isolated: bool = False, deterministic: bool = False
) -> _Function | Callable[[_Function], _Function]:
    """Offer a method of an `Environment` to the policy.

    Its JSON schema comes from its annotations and its docstring. What it returns or raises is shown: text as it is,
    anything else as JSON. Tools of different episodes run at the same time, in threads or, where `async def`, on one
    event loop; the thread of a call that takes too long goes on until it returns.

    `isolated=True` runs the tool in a forked process whose whole process group is killed afterwards: changes to
    `self` are lost, and a crash costs one call. `deterministic=True` says that its result follows from the task and
    the arguments alone, and that a call changes nothing: it is not called twice with the same arguments for one task.
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
    """Base class of environments: an instance lives for one episode, and is made with `environment.options`."""

    version: ClassVar[str] = "1"
    """Raise it when tools or rewards change their meaning; stored with every trajectory."""

    one_thread: ClassVar[bool] = False
    """True: one thread calls all that an instance does, its own; for connections that other threads may not use."""

    deterministic: ClassVar[bool] = False
    """True: every tool's result follows from the task and the calls before it, so equal calls are answered from memory.
    `reward` must then go by task and messages. Nothing checks that it is true."""

    def make_task(self, rng: random.Random) -> Task:
        """A random task, the same one for the same state of `rng`. Not needed where every task is a row."""
        raise NotImplementedError

    def task_from_row(self, row: Mapping[str, Any]) -> Task:
        """The task that a row of `tasks.data` stands for, the same one for the same row."""
        raise NotImplementedError

    def start(self, task: Task) -> Awaitable[None] | None:
        """Set up this episode's state; may be `async def`."""

    def restore(self, task: Task, messages: Sequence[Message]) -> Awaitable[None] | None:
        """Bring this instance, on which `start` was called, to the state that these messages of an earlier episode led
        to, for `replay.restarts`; may be `async def`. Not needed where all tools are deterministic: they are called
        again."""
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:
        """Free what `start` and tools took hold of, once `start` was called and the episode ended; may be `async def`.

        One that raises, or takes longer than `rollout.tool_timeout_s`, costs nothing: it is counted and warned of.
        """

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        """The reward of the whole conversation: a finite number, whatever the policy wrote."""
        raise NotImplementedError

    def turn_rewards(self, task: Task, messages: Sequence[Message]) -> Sequence[float] | None:
        """What each reply of the policy earned by itself, besides `reward`; None: this environment does not say.

        Asked with `advantage.credit: turn` of an instance that has played no episode.
        """

    def state_key(self, task: Task, messages: Sequence[Message]) -> str | None:
        """A name of the state, within its task, in which the policy is after these messages; None: what it was shown
        since its last reply names it.

        Asked with `advantage.credit: state`, of an instance that has played no episode, before each reply.
        """
        return None

    def achieved(self, task: Task, messages: Sequence[Message]) -> Sequence[Achieved]:
        """Other tasks that this conversation, which failed at `task`, has in fact solved, for `replay.hindsight`.

        What the tools answered from `first_turn` on must be what they would have answered for the new task. Asked of an
        instance that has played no episode; each is taken only if its `reward` is a success.
        """
        return ()

    def demonstrate(self, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
        """The next reply of a scripted demonstrator, which the warm-up of the built-in model imitates."""
        raise NotImplementedError
