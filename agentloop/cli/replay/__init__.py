"""`agentloop replay ...`: look into a buffer, and keep it in order. One module per kind of command."""

from agentloop.cli.replay import exchange_commands, label, look, maintain, mix
from agentloop.cli.replay.common import app

__all__ = ["app", "exchange_commands", "label", "look", "maintain", "mix"]
