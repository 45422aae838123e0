"""Runs an agent's program in a sandbox from which it can reach the gateway and nothing else."""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from agentloop.environments.sandbox import one_address
from agentloop.environments.sandbox.bubblewrap import MemoryGroup, SandboxLimits, contained, memory_group
from agentloop.environments.sandbox.python_sandbox import usable_interpreter

INSIDE = "http://127.0.0.1:8000"
"""The gateway's address inside a sandbox."""


@dataclass(frozen=True)
class ContainedAgent:
    """An agent's command in a sandbox."""

    words: list[str]
    status: BinaryIO
    """A file, to be inherited, in which bubblewrap notes how its program ended."""
    group: MemoryGroup | None

    @property
    def is_lost(self) -> bool:
        """True if the command has ended before its program did: bubblewrap did not start, or somebody ended it."""
        self.status.seek(0)
        over_its_memory = self.group is not None and self.group.is_exceeded()  # bubblewrap ends with its program
        return b"exit-code" not in self.status.read() and not over_its_memory


@asynccontextmanager
async def contained_agent(
    command: Sequence[str], limits: SandboxLimits, *, read: Sequence[str], gateway: str, folder: Path
) -> AsyncIterator[ContainedAgent]:
    """Yield the words that start `command` in a sandbox, in which it sees the episode's `folder`.

    `read` are files and folders that it sees besides the system, this Python and the files of the command.
    """
    interpreter, socket, asked = usable_interpreter(), str(folder / "gateway"), urlsplit(gateway)
    server = await asyncio.start_unix_server(
        one_address.forward(lambda: asyncio.open_connection(asked.hostname, asked.port)), socket
    )
    users = folder / "passwd"
    users.write_text("agent:x:1000:1000::/tmp:/bin/sh\n")  # node does not start for a user without a name
    leading = str(shutil.copy(one_address.__file__, folder))
    for path in (folder, *folder.iterdir()):
        path.chmod(0o777 if path.is_socket() else 0o755)  # the sandbox runs as another user
    words = [os.path.abspath(word) if os.path.isfile(word) else word for word in command]
    words[0] = os.path.abspath(shutil.which(words[0]) or words[0])
    packages = [sys.prefix] if interpreter.prefix == sys.base_prefix else []  # another Python can't use these
    shown = [interpreter.prefix, *packages, *read, *filter(os.path.isfile, words), str(folder)]
    inside = [interpreter.executable, "-I", leading, socket, str(urlsplit(INSIDE).port), *words]
    with memory_group(limits.memory_mb) as group, tempfile.TemporaryFile() as status:
        further = ["--ro-bind", str(users), "/etc/passwd", "--json-status-fd", str(status.fileno())]
        whole = contained(inside, limits, shown=shown, further=further, cleared=False, memory="data")
        async with server:
            yield ContainedAgent(whole if group is None else group.entered(whole), status, group)
