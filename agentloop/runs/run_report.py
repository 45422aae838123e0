"""The report of a run, with its configuration as `agentloop config` prints it."""

import json
from pathlib import Path

from agentloop.config.config_file import load_plain
from agentloop.config.describe import describe_config
from agentloop.errors import UserError
from replay.pages.report import write_report
from replay.records import RunRecord
from replay.store import ReplayStore


def report_run(store: ReplayStore, path: Path, *, run: str | None = None) -> Path:
    """Write the report of `run`, or of the only one in `store`."""
    record = store.run(run)
    return write_report(store, path, run=record.id, config_text=_config_text(record))


def _config_text(record: RunRecord) -> str:
    """The configuration with the meaning of each key, or as it is stored where this version does not know its keys."""
    try:
        return describe_config(load_plain(record.config))
    except UserError:
        return json.dumps(dict(record.config), indent=2)
