"""The report of a run, with its configuration as `agentloop config` prints it."""

import json
from pathlib import Path

from agentloop.config.config_file import load_plain
from agentloop.config.describe import describe_config
from agentloop.errors import UserError
from replay.pages.report import write_report
from replay.store import ReplayStore


def report_run(store: ReplayStore, path: Path, *, run: str | None = None) -> Path:
    """Write the report of `run`, or of the only one in `store`."""
    record = store.run(run)
    try:
        config_text = describe_config(load_plain(record.config))
    except UserError:  # this version does not know all of its keys
        config_text = json.dumps(dict(record.config), indent=2)
    return write_report(store, path, run=record.id, config_text=config_text)
