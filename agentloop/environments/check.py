"""Checks an environment before a run starts, so that mistakes are one-line errors and not failures of episodes."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from numbers import Real
from typing import Any

from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from agentloop.config.sections.context import author_table
from agentloop.environments.environment import Environment, Observation, Task, quoted_task
from agentloop.environments.simulated_user import ScriptedUser, SimulatedUser
from agentloop.environments.tools.tool_schema import can_observe, resolved_hints
from agentloop.environments.tools.worker_threads import run_hook
from agentloop.errors import UserError, one_line
from agentloop.user_code import failing_as
from context.authors import LLM, Author
from context.messages import Message, admitted, canonical_json, messages_hash
from context.wording import suggest
from replay.errors import shortened
from replay.records import StopReason

_TRIALS = 4
_author_table = cache(author_table)


def check_class(environment: type, where: str, *, reads_rows: bool = False) -> type[Environment]:
    """Return the class if it defines all that an Environment needs to make tasks, or to read them from rows."""
    if not issubclass(environment, Environment):
        raise UserError(
            f"{where} must be a subclass of agentloop.environments.Environment, "
            f"got class {environment.__name__}({', '.join(base.__name__ for base in environment.__bases__)})."
        )
    why = " when tasks.data names rows" if reads_rows else ""
    tasks = "task_from_row(self, row) -> Task" if reads_rows else "make_task(self, rng) -> Task"
    for signature in (tasks, "reward(self, task, messages) -> float"):
        name = signature.partition("(")[0]
        if getattr(environment, name) is getattr(Environment, name):
            if name == "reward" and can_observe(environment):
                continue  # the rewards of observations add up
            other = "" if reads_rows or name == "reward" else " Or name rows to read with tasks.data."
            raise UserError(f"{where} must define {name}{why}, got none. Write def {signature}.{other}")
    if isinstance(environment.user, SimulatedUser | ScriptedUser):
        raise UserError(f"{where}.user must be set in start, got one that all episodes share. Set self.user there.")
    if not isinstance(environment.version, str):
        raise UserError(f"{where}.version must be text, got {environment.version!r}.")
    return environment


def check_options(environment: type[Environment], options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert the options to the types of the constructor's annotations: a YAML list becomes a tuple, for example."""
    parameters = inspect.signature(environment).parameters
    kinds = inspect.Parameter
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
    known = [p.name for p in parameters.values() if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
    for name in options:
        if name not in known and not takes_any:
            raise UserError(f"environment.options must be arguments of {where}, got {name!r}. {suggest(name, known)}")
    for name in known:
        if name not in options and parameters[name].default is inspect.Parameter.empty:
            raise UserError(f"environment.options must give {name!r}, which {where} asks for, got none.")
    hints = resolved_hints(environment.__init__, f"{where}.__init__")
    return {name: _converted(name, value, hints.get(name, Any)) for name, value in options.items()}


def _converted(name: str, value: Any, annotation: Any) -> Any:
    try:
        return TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except PydanticSchemaGenerationError:
        return value
    except ValidationError:
        wanted = inspect.formatannotation(annotation)
        raise UserError(f"environment.options.{name} must be {wanted}, got {shortened(value)}.") from None


def check_task(task: Any, where: str, registered: Sequence[Author]) -> None:
    """Raise UserError unless the task, which the method `where` returned, can be shown, hashed and stored."""
    if not isinstance(task, Task):
        raise UserError(f"{where} must return a Task, got {type(task).__name__}.")
    if not isinstance(task.prompt, str):
        messages = task.prompt
        if not (isinstance(messages, tuple) and messages and all(isinstance(m, Message) for m in messages)):
            raise UserError(
                f"{where} must return a Task whose prompt is text or a tuple of Messages, "
                f"got {type(messages).__name__}."
            )
        try:
            admitted(task.messages(), _author_table(tuple(registered)), opening=True)
        except ValueError as error:
            raise UserError(f"{where} must return messages that can open an episode, got one: {error}") from None
    if not isinstance(task.hint, str | None):
        raise UserError(f"{where} must return a Task whose hint is text or None, got {type(task.hint).__name__}.")
    try:
        canonical_json(task.payload)
        messages_hash(task.messages())
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{where} must return a Task whose payload and messages have a JSON form, got {one_line(error)}."
        ) from error


def check_repeatable(make: Callable[[int], Task], where: str, *, reads_rows: bool) -> Task:
    """Check that tasks depend on nothing but the random numbers or the row, and return one of them."""
    pairs = [(make(trial), make(trial)) for trial in range(_TRIALS)]
    if any((one.payload, one.messages(), one.tools) != (two.payload, two.messages(), two.tools) for one, two in pairs):
        method, source = ("task_from_row", "row") if reads_rows else ("make_task", "rng")
        rule = f"{where}.{method} must make the same task from the same {source}"
        raise UserError(f"{rule}, got two different ones. Take nothing from elsewhere.")
    return pairs[0][0]


def check_reward(environment: Environment, task: Task, where: str) -> None:
    """Start an episode, compute its reward after an empty reply, and close it."""
    try:
        start_now(environment, task, where)
        reward_now(environment, task, (*task.messages(), Message("assistant", "", author=LLM)), where)
    finally:
        with failing_as(f"{where}.close must free what an episode holds, got", " after an empty reply. Mend it."):
            run_hook(environment.close)


def start_now(environment: Environment, task: Task, where: str) -> None:
    """Start an instance outside of an episode."""
    advice = f" for {quoted_task(task)}. Mend it."
    with failing_as(f"{where}.start must accept its tasks, got", advice):
        run_hook(environment.start, task)


def respond_now(environment: Environment, task: Task, messages: Sequence[Message], where: str) -> Observation | None:
    """Ask a started instance what it says to the last reply, outside of an episode; None: the reply was the answer."""
    asked = quoted_task(task, messages)
    with failing_as(f"{where}.respond must answer any reply, got", f" for {asked}. Mend it."):
        given = run_hook(environment.respond, task, messages)
    return said_by(given, f"{where}.respond", asked)


def said_by(given: Any, where: str, asked: str) -> Observation | None:
    """Read what the method `where` returned for the task and reply `asked`, in any of its forms, as a list of messages.

    None: the reply was the answer.
    """
    if given is None:
        return None
    observation = given if isinstance(given, Observation) else Observation(given)
    shown, over = observation.content, observation.over
    reward = None if observation.reward is None else float(observation.reward)
    messages = [Message("user", shown)] if isinstance(shown, str) else [shown] if isinstance(shown, Message) else shown
    if messages is None or (messages in ([], ()) and over):
        return Observation([], reward, over)
    if not (isinstance(messages, list | tuple) and messages and all(isinstance(each, Message) for each in messages)):
        raise UserError(
            f"{where} must return a text, Messages, an Observation or None, got {shown!r:.200} for {asked}. Mend it."
        )
    return Observation(list(messages), reward, over)


def reward_now(environment: Environment, task: Task, messages: Sequence[Message], where: str) -> float:
    """Compute the reward of a conversation with a started instance, outside of an episode."""
    asked = quoted_task(task, messages)
    advice = f" for {asked}. Return 0.0 there."
    environment.stop_reason = StopReason.ANSWERED
    with failing_as(f"{where}.reward must judge any reply, got", advice):
        reward: Any = run_hook(environment.reward, task, messages)
    if not isinstance(reward, Real) or not math.isfinite(reward):
        raise UserError(f"{where}.reward must return a finite number, got {reward!r} for {asked}. Mend it.")
    return float(reward)
