"""`agentloop replay ...`: look into a buffer, and keep it in order. One file per group of commands."""

from replay.cli import exchange, keep, look, preview, relate, task
from replay.cli.front import app, newest_run_folder
from replay.cli.look import show

__all__ = ["app", "exchange", "keep", "look", "newest_run_folder", "preview", "relate", "show", "task"]
