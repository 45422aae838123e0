"""Runs a program so that all its descendants end with it. Agents and MCP servers are run this way."""

import os
import sys
from collections.abc import Sequence

_ENDS_ALL = """\
import ctypes, os, signal, sys
code = 1
def end(*_):
    while True:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/stat") as stat:
                    if int(stat.read().rpartition(")")[2].split()[1]) == os.getpid():
                        os.kill(int(pid), 9)
            except OSError:
                pass
        try:
            os.wait()
        except ChildProcessError:
            os._exit(code)
signal.signal(15, end)
prctl = ctypes.CDLL(None).prctl
prctl(36, 1)
prctl(1, 15)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
child = os.fork()
if child == 0:
    os.setsid()
    os.execvp(sys.argv[2], sys.argv[2:])
pid = 0
while pid != child:
    pid, status = os.wait()
code = os.waitstatus_to_exitcode(status)
code = 128 - code if code < 0 else code
end()
"""


def ending_all(words: Sequence[str]) -> list[str]:
    """Build the command that runs a program in a session of its own and, on Linux, ends all its descendants.

    They are killed when the program ends, at SIGTERM, and when this process dies. The command's own process adopts
    every descendant that loses its parent (PR_SET_CHILD_SUBREAPER), so that no daemon escapes.
    """
    before = [sys.executable, "-I", "-S", "-c", _ENDS_ALL, str(os.getpid())] if sys.platform == "linux" else []
    return [*before, *words]
