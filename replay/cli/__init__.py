"""`agentloop replay ...`: look into a buffer, and keep it in order. One file per group of commands."""

from replay.cli import compare_commands, exchange_commands, maintain, show_cluster, show_held_out, show_tasks
from replay.cli.common import app
from replay.cli.show import show
from replay.locate import newest_run_folder

__all__ = [
    "app",
    "compare_commands",
    "exchange_commands",
    "maintain",
    "newest_run_folder",
    "show",
    "show_cluster",
    "show_held_out",
    "show_tasks",
]
