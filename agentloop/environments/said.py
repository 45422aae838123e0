"""Reads what an environment says to a reply, in any of the forms that `Environment.respond` may return."""

from dataclasses import dataclass
from typing import Any

from agentloop.environments.environment import Observation
from agentloop.errors import UserError
from context.messages import Message


@dataclass(frozen=True)
class Said:
    """What an environment says to one reply."""

    messages: list[Message]
    """The messages that follow the reply: tool results, or a user's."""
    reward: float | None = None
    over: bool = False


def said_by(given: Any, where: str, asked: str) -> Said | None:
    """Read what the method `where` returned for the task and reply `asked`; None: the reply was the answer."""
    if given is None:
        return None
    observation = given if isinstance(given, Observation) else Observation(given)
    shown, over = observation.content, observation.over
    reward = None if observation.reward is None else float(observation.reward)
    messages = [Message("user", shown)] if isinstance(shown, str) else [shown] if isinstance(shown, Message) else shown
    if messages is None or (messages in ([], ()) and over):
        return Said([], reward, over)
    if not (isinstance(messages, list | tuple) and messages and all(isinstance(each, Message) for each in messages)):
        raise UserError(
            f"{where} must return a text, Messages, an Observation or None, got {shown!r:.200} for {asked}. Mend it."
        )
    return Said(list(messages), reward, over)
