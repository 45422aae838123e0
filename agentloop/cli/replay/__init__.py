"""The commands `agentloop replay ...`, which show and maintain a buffer. Each module has commands of one kind."""

from agentloop.cli.replay import exchange_commands, look, maintain, mix
from agentloop.cli.replay.common import app

__all__ = ["app", "exchange_commands", "label", "look", "maintain", "mix"]
