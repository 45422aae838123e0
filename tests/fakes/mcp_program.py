"""A real MCP server of the official SDK, with a state and with one tool per fault.

`python mcp_program.py` speaks over its pipes, `python mcp_program.py PORT` over HTTP.
"""

import base64
import os
import subprocess
import sys
import threading
import time

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("notes", log_level="CRITICAL")
notes: list[str] = []


@server.tool()
def keep(text: str) -> int:
    """Keep a note.

    Returns how many there are.
    """
    notes.append(text)
    return len(notes)


@server.tool()
def kept() -> list[str]:
    """All notes."""
    return notes


@server.tool(structured_output=False)
def say(text: str) -> str:
    """Say a text."""
    return text


@server.tool(name="add.numbers")
def add(a: int, b: int = 2) -> dict[str, int]:
    """Add two numbers."""
    return {"sum": a + b}


@server.tool()
def fail(words: int) -> str:
    """Fail with so many words."""
    raise ToolError("bad " * words)


@server.tool(structured_output=False)
def picture() -> list[str | Image]:
    """A picture and its title."""
    return ["a dot", Image(data=base64.b64decode("iVBORw0KGgo="), format="png")]


@server.tool(structured_output=False)
def flood(megabytes: int) -> str:
    """So many megabytes."""
    return "x" * (megabytes << 20)


@server.tool()
def hang() -> str:
    """Never return."""
    time.sleep(3600)
    return "never"


@server.tool()
def crash() -> str:
    """End the server."""
    print("out of luck", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool(structured_output=False)
def chatter() -> str:
    """Print to where messages go."""
    os.write(1, b"hello \xff\n")
    return "said it"


@server.tool()
def child() -> list[int]:
    """Start a process; its id and the server's."""
    return [subprocess.Popen(["sleep", "3600"]).pid, os.getpid()]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        # It ends with who started it, however that went.
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
