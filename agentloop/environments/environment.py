"""The base class of environments. An environment makes or reads tasks, offers tools and rewards conversations."""

import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar, TypeVar, overload

from agentloop.environments.simulated_user import ScriptedUser, SimulatedUser
from agentloop.errors import WrongObservation
from context.authors import DEMONSTRATION, INITIALIZATION, LLM, USER, default_authors
from context.messages import Message
from context.wording import excerpt

_TOOL_MARK = "_agentloop_tool"
_LONGEST_EXCERPT = 60
_BUILT_IN_AUTHORS = frozenset(author.name for author in default_authors().authors) - {DEMONSTRATION}
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Task:
    """One thing that the policy is asked to do, with the data to judge it."""

    prompt: str | tuple[Message, ...]
    """The user's message or an opening conversation. Messages of authors registered as trained are trained on."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """Data for tools and rewards: JSON values, in which the order of keys does not matter. The policy never sees it."""
    hint: str | None = None
    """Help that the context strategy `hint` shows while the policy samples; other strategies ignore it."""
    environment: str | None = None
    """Name of the task's environment in a run with several; the run sets it. None in a run with one."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    """Schemas of the tools that `Environment.tools_for` offers; the run sets them. None: all of its environment."""

    def messages(self) -> tuple[Message, ...]:
        """Return the opening conversation; messages without an author of `context.authors` are by `user` or
        `initialization`."""
        if isinstance(self.prompt, str):
            return (Message("user", self.prompt, author=USER),)
        return tuple(
            replace(message, author=USER if message.role == "user" else INITIALIZATION)
            if message.author in _BUILT_IN_AUTHORS
            else message
            for message in self.prompt
        )


@dataclass(frozen=True)
class Observation:
    """What a tool or `respond` returns to give a reward or end the episode, besides a text."""

    content: Any = None
    """From a tool: what it would return otherwise. From `respond`: a text or messages. None: nothing is shown."""
    reward: float | None = None
    """The reward for the reply. The rewards of an episode add up, unless the environment has a `reward`."""
    over: bool = False
    """True: the episode is over. The content is stored, and no prompt shows it."""

    def __post_init__(self) -> None:
        if self.reward is not None and not (isinstance(self.reward, Real) and math.isfinite(self.reward)):
            raise WrongObservation(f"Observation.reward must be a finite number or None, got {self.reward!r}. Mend it.")
        if self.content is None and not self.over:
            raise WrongObservation(
                "Observation.content must be given while the episode goes on, got None. Show a text."
            )


Response = str | Message | Sequence[Message] | Observation | None
"""What `Environment.respond` returns."""


@dataclass(frozen=True)
class Achieved:
    """A task that the last turns of a conversation solved, though the conversation was about another task."""

    task: Task
    first_turn: int
    """Number of the first of these replies, from 0: this reply answers the prompt of `task`."""


def quoted_task(task: Task, messages: Sequence[Message] = ()) -> str:
    """Quote a task and the last reply to it in an error, cut short: `the task 'What is ...' and the reply '42'`."""
    asked = f"the task {_excerpt(task.messages()[-1])}"
    reply = next((message for message in reversed(messages) if message.role == "assistant"), None)
    return asked if reply is None else f"{asked} and the reply {_excerpt(reply)}"


def observed_rewards(messages: Sequence[Message]) -> tuple[float, ...] | None:
    """Return the reward of each reply by observations, 0 where there is none; None: no reply has a reward."""
    rewards = [message.reward for message in messages if message.author in (LLM, DEMONSTRATION)]
    return None if all(reward is None for reward in rewards) else tuple(reward or 0.0 for reward in rewards)


def _excerpt(message: Message) -> str:
    text = message.content or ", ".join(call.name for call in message.tool_calls)
    return repr(excerpt(text, _LONGEST_EXCERPT))


@overload
def tool(function: _Function) -> _Function: ...


@overload
def tool(*, deterministic: bool = False) -> Callable[[_Function], _Function]: ...


def tool(
    function: _Function | None = None, *, deterministic: bool = False
) -> _Function | Callable[[_Function], _Function]:
    """Offer a method of an `Environment` to the policy.

    The tool's JSON schema comes from its annotations and its docstring. The policy is shown the value that the tool
    returns, or the exception that it raises: text as it is, any other value as JSON. Tools of different episodes run
    at the same time: an `async def` tool on one event loop, any other tool in a thread. The thread of a call that
    takes too long goes on until the call returns.

    `deterministic=True` promises that the result follows from the task and the arguments alone, and that a call
    changes nothing. Such a tool is called once per task and arguments.
    """

    def mark(function: _Function) -> _Function:
        setattr(function, _TOOL_MARK, bool(deterministic))
        return function

    return mark if function is None else mark(function)


def tool_mark(method: object) -> bool | None:
    """Return whether a tool is deterministic; None for an object that is no tool."""
    # The mark of a staticmethod or classmethod may be on the object itself or on the function inside it.
    marks = (getattr(carrier, _TOOL_MARK, None) for carrier in (method, getattr(method, "__func__", None)))
    return next((mark for mark in marks if isinstance(mark, bool)), None)


class Environment:
    """Base class of environments. An instance lives for one episode and is made with `environment.options`."""

    version: ClassVar[str] = "1"
    """Stored with every trajectory. Raise the version when tools or rewards change their meaning."""

    one_thread: ClassVar[bool] = False
    """True: one thread makes all calls of an instance, for connections that no other thread may use."""

    deterministic: ClassVar[bool] = False
    """True: every tool's result follows from the task and the calls before it, so equal calls are answered from memory.
    `reward` must then depend on task and messages alone. Nothing checks the promise."""

    rewards_every_end: ClassVar[bool] = False
    """True: `reward` is also asked where a limit ended the episode. `self.stop_reason` tells it what the end was."""

    user: SimulatedUser | ScriptedUser | None = None
    """The user that `respond` asks. The run counts what the user took."""

    stop_reason: str | None = None
    """Why this episode ended; set before `reward` is asked. None: it goes on."""

    def make_task(self, rng: random.Random) -> Task:
        """Make a random task, the same task for the same state of `rng`. Not needed where every task is a row."""
        raise NotImplementedError

    def task_from_row(self, row: Mapping[str, Any]) -> Task:
        """Make the task of a row of `tasks.data`, the same task for the same row."""
        raise NotImplementedError

    def start(self, task: Task) -> Awaitable[None] | None:
        """Set up this episode's state; may be `async def`."""

    def tools_for(self, task: Task) -> Sequence[str | Mapping[str, Any]] | None:
        """Name the tools that the policy is offered in this task; None: all tools of the class.

        An entry is the name of a tool of the class, or a schema as OpenAI writes one. `call_tool` answers the calls of
        tools that are given as schemas. The tools are part of the task, so they must follow from the task alone. The
        method is called on an instance that was not started.
        """
        return None

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        """Answer a call of a tool whose schema came from `tools_for`; may be `async def`. See `tool` for the result."""
        raise NotImplementedError

    def respond(self, task: Task, messages: Sequence[Message]) -> Awaitable[Response] | Response:
        """Answer a reply that calls no tool; may be `async def`. None: the reply was the answer, and the episode ends.

        The policy is shown a text as a user's message; messages keep their role, and `author="env"` marks those that
        no user wrote. Nothing of it is trained. The method is not asked after the last turn of `rollout.max_turns`.
        """
        return None

    def close(self) -> Awaitable[None] | None:
        """Free the resources of `start` and tools when a started episode has ended; may be `async def`.

        A `close` that raises, or takes longer than `rollout.tool_timeout_s`, costs no episode: the run counts and
        logs it.
        """

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        """Reward the whole conversation with a finite number, whatever the policy wrote.

        Without this method, the reward is the sum of the rewards of the episode's observations, at whatever end.
        """
        return math.fsum(observed_rewards(messages[len(task.messages()) :]) or ())

    def turn_rewards(self, task: Task, messages: Sequence[Message]) -> Sequence[float] | None:
        """Reward each reply of the policy by itself, besides `reward`; None: the rewards of observations, if any.

        `advantage.credit: turn` calls this on an instance that has played no episode.
        """

    def achieved(self, task: Task, messages: Sequence[Message]) -> Sequence[Achieved]:
        """Find other tasks that a conversation solved though it failed at `task`, for `replay.hindsight`.

        From `first_turn` on, the tools must have answered exactly as they would have for the new task. The method is
        called on an instance that has played no episode. A task counts only if its `reward` is a success.
        """
        return ()

    def demonstrate(self, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
        """Give the next reply of a scripted demonstrator, which the warm-up of the built-in model imitates."""
        raise NotImplementedError
