"""Programs try to leave the sandbox: each way out has a test. Without bubblewrap these tests fail."""

import os
import socket
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent

import pytest

from agentloop.environments.sandbox import PythonSandbox, SandboxLimits, SandboxRun
from agentloop.environments.sandbox.bubblewrap import memory_group
from tests.fakes.processes import processes


def attempt(program: str, limits: SandboxLimits | None = None) -> SandboxRun:
    return PythonSandbox(limits=limits).run(dedent(program))


def printed(program: str) -> str:
    """Run a program that must succeed, and return its output."""
    run = attempt(program)
    assert run.succeeded, run.observation()
    return run.output.strip()


TRYING = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def called(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
"""
REFUSED = {
    "raw sockets": "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)",
    "its own program": "open('/code/main.py', 'w')",
    "a terminal": "open('/dev/tty')",
    "a process of this machine": f"os.kill({os.getpid()}, 15)",
    "who the first process is": "print(open('/proc/1/environ').read() or 1 / 0)",
    "a user namespace": "called(libc.unshare(0x10000000))",
    "a mount namespace": "called(libc.unshare(0x00020000))",
    "a mount": "called(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))",
    "a file as large as all": "open('/tmp/mine', 'wb').truncate(17 << 20)",
    **{
        f"/proc/{place}": f"print(open('/proc/{place}', 'rb').read(1) or 1 / 0)"
        for place in ("kcore", "kmsg", "1/mem", "1/root/root", "1/fd/0")
    },
    **{
        f"/proc/{place}": f"open('/proc/{place}', 'w').write('1')"
        for place in ("sys/kernel/core_pattern", "sys/vm/drop_caches", "sys/user/max_user_namespaces", "sysrq-trigger")
    },
    "a link": "os.symlink('/proc/1/root/root', '/tmp/link'); print(os.listdir('/tmp/link'))",
    "many files": "for n in range(40): open(f'/dev/shm/{n}', 'wb').write(bytes(1 << 20))",
    "memory of one process": "bytearray(600 << 20)",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_leads_outside_is_refused(what: str) -> None:
    run = attempt(TRYING + REFUSED[what])
    assert run.exit_code == 1, run.observation()
    refusals = ("PermissionError", "OSError", "FileNotFoundError", "ProcessLookupError", "ZeroDivision", "MemoryError")
    assert run.output.splitlines()[-1].startswith(refusals)


def test_network_has_no_device_but_its_own_loopback_and_no_way_out() -> None:
    name = f"\0agentloop-{uuid.uuid4()}"
    with socket.socket(socket.AF_UNIX) as server, socket.create_server(("127.0.0.1", 0)) as near:
        server.bind(name)
        server.listen()
        answer = printed(f"""
            import socket
            print(socket.if_nameindex())
            for address in (("192.0.2.1", 80), ("169.254.169.254", 80), ("127.0.0.1", {near.getsockname()[1]})):
                try:
                    socket.create_connection(address, timeout=1)
                except OSError as error:
                    print(error.strerror)
            try:
                socket.socket(socket.AF_UNIX).connect({name!r})
            except OSError as error:
                print(error.strerror)
            """)
    unreachable, refused = "Network is unreachable", "Connection refused"
    assert answer.splitlines() == ["[(1, 'lo')]", unreachable, unreachable, refused, refused]


def test_files_outside_are_not_there(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    secret.chmod(0o644)
    home = [str(path) for path in Path.home().iterdir() if not Path(sys.base_prefix).is_relative_to(path)]
    places = [str(secret), *home, __file__, "/etc/passwd", "/etc/hosts", "/var", "/run", "/opt"]
    there = printed(f"import os\nprint([place for place in {places} if os.path.lexists(place)], *os.listdir('/'))")
    none, *top = there.split()
    assert none == "[]"
    assert {*top} - {"bin", "sbin", "lib", "lib32", "lib64", "libx32"} == {"code", "dev", "etc", "proc", "tmp", "usr"}


def test_nothing_can_be_written_but_two_temporary_places() -> None:
    """The program tries every folder except those of /proc, which `REFUSED` covers."""
    written = printed("""
        import os
        for folder, folders, _ in os.walk("/"):
            folders[:] = [name for name in folders if os.path.join(folder, name) != "/proc"]
            if folder.count("/") > 3:
                folders.clear()
            try:
                open(os.path.join(folder, "mine"), "w").close()
                print(folder)
            except OSError:
                pass
        """)
    assert sorted(written.split()) == ["/dev/shm", "/tmp"]
    assert printed("import os\nprint(os.listdir('/tmp'), os.listdir('/dev/shm'))") == "[] []"
    assert not Path("/tmp/mine").exists() and not Path("/dev/shm/mine").exists()


def test_environment_variables_and_open_files_stay_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "the secret")
    with open(tmp_path / "secret.txt", "w+") as file:
        os.set_inheritable(file.fileno(), True)
        lines = printed("""
            import glob, os
            print(*os.environ)
            for path in glob.glob("/proc/[0-9]*/environ"):
                try:
                    assert b"secret" not in open(path, "rb").read(), path
                except PermissionError:
                    pass
            for number in range(3, 1024):
                try:
                    os.fstat(number)
                    print(number)
                except OSError:
                    pass
            """).splitlines()
    assert len(lines) == 1
    assert set(lines[0].split()) <= {"HOME", "LANG", "MALLOC_ARENA_MAX", "PATH", "PWD"}


def test_program_sees_its_own_processes_alone_and_has_no_privileges() -> None:
    *lines, status = printed("""
        import glob, os, signal
        for path in sorted(glob.glob("/proc/[0-9]*/cmdline")):
            print(open(path).read().replace(chr(0), " "))
        os.kill(1, signal.SIGKILL)
        fields = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
        names = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs")
        print(*(int(fields[name], 16) for name in names), os.getuid(), os.getgid())
        """).splitlines()
    assert len(lines) == 2 and "bwrap" in lines[0] and lines[1].strip().endswith("-I /code/main.py")
    assert status == "0 0 0 0 0 1 1000 1000"


def test_processes_of_sandboxes_are_counted_apart_and_threads_among_them() -> None:
    counting = """
        import os, threading, time
        begun = 1
        try:
            while True:
                if os.fork() == 0:
                    time.sleep(60)
                begun += 1
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
                begun += 1
        except (BlockingIOError, RuntimeError):
            print(begun, flush=True)
        os._exit(0)
        """
    with ThreadPoolExecutor(3) as threads:
        assert [run.output for run in threads.map(attempt, [counting] * 3)] == [f"{SandboxLimits().processes}\n"] * 3


HOARDS = {
    "many processes": """
        import os, time
        for _ in range(8):
            if os.fork() == 0:
                data = bytearray(40 << 20)
                time.sleep(60)
        time.sleep(60)
        """,
    "buffers of sockets": """
        import os, socket, time
        for _ in range(12):
            if os.fork() == 0:
                break
        server = socket.create_server(("127.0.0.1", 0))
        held, sent = [], 0
        while len(held) < 50:
            held += [socket.create_connection(server.getsockname()), server.accept()[0]]
            held[-2].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
            held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30)
            held[-2].setblocking(False)
            try:
                for _ in range(400):
                    sent += held[-2].send(bytes(1 << 16))
            except OSError:
                pass
        os.write(1, f"{sent}\\n".encode())
        time.sleep(60)
        """,
}


@pytest.fixture
def counts_memory() -> Iterator[None]:
    with memory_group(64) as group:
        if group is None:
            pytest.skip("this machine lets us make no cgroup")
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("counts_memory")
@pytest.mark.parametrize("kind", HOARDS)
def test_memory_of_all_processes_together_is_bounded_whatever_it_is(kind: str) -> None:
    """The program ends, or holds at most twice the limit, because sockets may be counted separately."""
    run = attempt(HOARDS[kind], SandboxLimits(seconds=4, memory_mb=128))
    assert run.stopped == "memory" or (kind == "buffers of sockets" and run.stopped == "time")
    assert sum(map(int, run.output.split())) <= 256 << 20


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False], ids=["ends", "hangs"])
def test_no_process_outlives_its_program(ends: bool) -> None:
    """A daemon that has left session, group and streams, ignores signals, and sleeps."""
    mark = str(uuid.uuid4())
    run = attempt(
        f"""
        import os, signal, subprocess, sys, time
        daemon = "import signal, time\\nfor n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)\\ntime.sleep(600)"
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for number in (0, 1, 2):
                    os.close(number)
                os.execv(sys.executable, ["python", "-c", daemon, {mark!r}])
            os._exit(0)
        while not any({mark!r} in open(f"/proc/{{n}}/cmdline").read() for n in os.listdir("/proc") if n.isdigit()):
            time.sleep(0.01)
        print("it sleeps", flush=True)
        while not {ends}:
            time.sleep(60)
        """,
        SandboxLimits(seconds=30.0 if ends else 3.0),
    )
    assert run.output == "it sleeps\n"
    assert run.stopped == (None if ends else "time")
    assert processes(lambda one: mark.encode() in (one / "cmdline").read_bytes()) == []
