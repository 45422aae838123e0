"""The MCP server of `mcp_program`, as configurations name it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentloop.config.sections.environments import McpServerSection
from agentloop.engines.serving.engine_process import free_port
from tests.fakes.processes import until

PROGRAM = Path(__file__).with_name("mcp_program.py")


def program(*, tools: tuple[str, ...] | None = None) -> McpServerSection:
    """Started for each episode."""
    return McpServerSection(command=(sys.executable, str(PROGRAM)), tools=tools)


@contextmanager
def over_http(*, port: int | None = None) -> Iterator[str]:
    """Its address while it runs, in a process of its own."""
    port = port or free_port()
    process = subprocess.Popen(
        [sys.executable, PROGRAM, str(port)], start_new_session=True, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        while not _answers(port):
            assert process.poll() is None
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


def ended(pid: int) -> bool:
    """Gone, and no zombie."""
    until(lambda: not Path(f"/proc/{pid}").exists(), limit_s=30.0)
    return True
