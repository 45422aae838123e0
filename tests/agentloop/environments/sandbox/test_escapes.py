"""What a program in the sandbox tries, and does not get: each way out has a test. Without bubblewrap they fail."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import uuid
from pathlib import Path
from textwrap import dedent

import pytest

from agentloop.environments.sandbox import PythonSandbox, SandboxLimits, SandboxRun

SHORT = SandboxLimits(seconds=1.5)
BOTH_PLACES = ("/tmp", "/dev/shm")


def attempt(program: str, limits: SandboxLimits | None = None) -> SandboxRun:
    return PythonSandbox(limits=limits).run(dedent(program))


def printed(program: str) -> str:
    """Of a program that is to end well."""
    run = attempt(program)
    assert run.succeeded, run.observation()
    return run.output.strip()


def processes_with(mark: str) -> list[int]:
    """Processes of this machine that have the mark in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if mark.encode() in words:
            found.append(int(folder.name))
    return found


# Network


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_network_of_this_machine_is_not_reached(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.create_server((host, 0), family=family) as server:
        server.settimeout(0.5)
        port = server.getsockname()[1]
        run = attempt(f"import socket\nsocket.create_connection(({host!r}, {port}), timeout=1)")
        assert run.exit_code == 1
        with pytest.raises(TimeoutError):
            server.accept()


def test_network_beyond_this_machine_is_not_reached() -> None:
    answer = printed("""
        import socket
        for address in (("192.0.2.1", 80), ("169.254.169.254", 80)):
            try:
                socket.create_connection(address, timeout=1)
            except OSError as error:
                print(error.strerror)
        try:
            socket.getaddrinfo("example.org", 80)
        except OSError as error:
            print("no name")
        """)
    assert answer.splitlines() == ["Network is unreachable", "Network is unreachable", "no name"]


def test_network_has_no_device_but_its_own_loopback() -> None:
    assert printed("import socket\nprint(socket.if_nameindex())") == "[(1, 'lo')]"


def test_sockets_by_abstract_name_are_those_of_the_sandbox() -> None:
    name = f"\0agentloop-{uuid.uuid4()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        run = attempt(f"import socket\nsocket.socket(socket.AF_UNIX).connect({name!r})")
    assert "ConnectionRefusedError" in run.output


def test_raw_sockets_are_refused() -> None:
    run = attempt("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)")
    assert "PermissionError" in run.output


# File system


def test_files_outside_are_not_there(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    secret.chmod(0o644)
    home = [str(path) for path in Path.home().iterdir() if not Path(sys.base_prefix).is_relative_to(path)]
    places = [str(secret), *home, __file__, "/etc/passwd", "/etc/hosts", "/var", "/run", "/opt"]
    there = printed(f"import os\nprint([place for place in {places} if os.path.lexists(place)])")
    assert there == "[]"


def test_top_of_the_file_system_is_the_system_alone() -> None:
    names = set(printed("import os\nprint(*os.listdir('/'))").split())
    assert names - {"bin", "sbin", "lib", "lib32", "lib64", "libx32"} == {"code", "dev", "etc", "proc", "tmp", "usr"}


def test_nothing_can_be_written_but_two_temporary_places() -> None:
    """Every folder is tried but those of /proc, which `test_settings_of_the_kernel_are_not_changed` tries."""
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


def test_what_one_program_wrote_is_not_there_for_the_next() -> None:
    writes = "for place in ('/tmp/mine', '/dev/shm/mine'):\n    open(place, 'w').write('here')\n"
    assert printed(writes + "print('written')") == "written"
    assert printed("import os\nprint(os.listdir('/tmp'), os.listdir('/dev/shm'))") == "[] []"
    assert not Path("/tmp/mine").exists() and not Path("/dev/shm/mine").exists()


def test_its_own_program_can_not_be_changed() -> None:
    assert "Read-only file system" in attempt("open('/code/main.py', 'w')").output


def test_devices_are_those_that_hold_nothing() -> None:
    names = printed("import os\nprint(*sorted(os.listdir('/dev')))").split()
    assert set(names) == {
        *("console", "core", "fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty"),
        *("urandom", "zero"),
    } - ({"console"} if "console" not in names else set())
    assert "No such device" in attempt("open('/dev/tty')").output


# Symbolic links


def test_symbolic_links_lead_nowhere_outside(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    run = attempt(f"""
        import os
        os.symlink({str(secret)!r}, "/tmp/link")
        os.symlink("/tmp/../../../../../..{secret}", "/tmp/dots")
        os.symlink("/proc/1/root{secret}", "/tmp/root")
        for link in ("/tmp/link", "/tmp/dots", "/tmp/root", "/proc/1/cwd{secret}", "/proc/self/root{secret}"):
            try:
                print(open(link).read())
            except OSError as error:
                print(type(error).__name__)
        """)
    assert set(run.output.split()) <= {"FileNotFoundError", "PermissionError"}


def test_links_to_the_system_do_not_make_it_writable() -> None:
    run = attempt("""
        import os
        os.symlink("/usr/bin", "/tmp/bin")
        os.symlink("/proc/sys/kernel", "/tmp/kernel")
        for place in ("/tmp/bin/mine", "/tmp/kernel/hostname"):
            try:
                open(place, "w").write("mine")
                print("written")
            except OSError as error:
                print(error.strerror)
        """)
    assert set(run.output.splitlines()) <= {"Read-only file system", "Permission denied"}


# Environment, descriptors, terminal


def test_environment_variables_do_not_come_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "the secret")
    assert set(printed("import os\nprint(*os.environ)").split()) <= {"HOME", "LANG", "MALLOC_ARENA_MAX", "PATH", "PWD"}
    found = printed("""
        import glob
        print([path for path in glob.glob("/proc/[0-9]*/environ") if b"secret" in open(path, "rb").read()])
        """)
    assert found == "[]"


def test_open_files_do_not_come_along(tmp_path: Path) -> None:
    with open(tmp_path / "secret.txt", "w+") as file:
        os.set_inheritable(file.fileno(), True)
        numbers = printed("""
            import os
            for number in range(3, 1024):
                try:
                    os.fstat(number)
                    print(number)
                except OSError:
                    pass
            """)
    assert numbers == ""


# /proc


def test_processes_of_this_machine_are_not_seen() -> None:
    lines = printed("""
        import glob
        for path in glob.glob("/proc/[0-9]*/cmdline"):
            print(open(path).read().replace(chr(0), " "))
        """).splitlines()
    assert len(lines) == 2
    assert "bwrap" in lines[0] or "bwrap" in lines[1]
    assert any(line.strip().endswith("-I /code/main.py") for line in lines)


def test_processes_of_this_machine_are_not_signalled() -> None:
    run = attempt(f"import os\nos.kill({os.getpid()}, 15)")
    assert "ProcessLookupError" in run.output


def test_the_first_process_can_not_be_ended_from_inside() -> None:
    assert printed("import os, signal\nos.kill(1, signal.SIGKILL)\nprint('still here')") == "still here"


@pytest.mark.parametrize(
    "place",
    ["sys/kernel/core_pattern", "sys/vm/drop_caches", "sys/user/max_user_namespaces", "sysrq-trigger"],
)
def test_settings_of_the_kernel_are_not_changed(place: str) -> None:
    assert attempt(f"open('/proc/{place}', 'w').write('1')").exit_code == 1


@pytest.mark.parametrize("place", ["kcore", "kmsg", "1/mem", "1/environ", "1/root/root", "1/fd/0"])
def test_memory_of_others_is_not_read(place: str) -> None:
    run = attempt(f"data = open('/proc/{place}', 'rb').read(1)\nprint('read', data)")
    assert run.exit_code == 1 or run.output == "read b''\n"


# Privileges


def test_program_has_no_privileges_and_gets_none() -> None:
    status = printed("print(open('/proc/self/status').read())")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"
    assert printed("import os\nprint(os.getuid(), os.getgid(), os.getgroups())").split()[:2] == ["1000", "1000"]


@pytest.mark.parametrize(
    "call",
    [
        "unshare(0x10000000)",  # a user namespace, in which it would be root
        "unshare(0x00020000)",  # a mount namespace
        "mount(b'none', b'/tmp', b'tmpfs', 0, None)",
        "syscall(101, 0, 0, 0, 0)",  # ptrace
        "shmget(0, 1 << 20, 0o1600)",
        "msgget(0, 0o1600)",
        "memfd_create(b'mine', 0)",
        "syscall(425, 8, 0)",  # io_uring_setup
        "syscall(321, 0, 0, 0)",  # bpf
        "syscall(250, 0, 0, 0)",  # keyctl
    ],
)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are those of x86-64")
def test_system_calls_that_lead_outside_are_refused(call: str) -> None:
    answer = printed(f"""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.{call}, os.strerror(ctypes.get_errno()))
        """)
    assert answer == "-1 Operation not permitted"


def test_clone_makes_no_namespace_either() -> None:
    answer = printed("""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0), os.strerror(ctypes.get_errno()))
        """)
    assert answer == "-1 No space left on device"


# Processes


def test_fork_bomb_is_bounded_and_nothing_of_it_is_left() -> None:
    mark = str(uuid.uuid4())
    run = attempt(
        f"""
        import os, sys
        MARK = {mark!r}
        while True:
            try:
                if os.fork() == 0:
                    continue
            except OSError:
                pass
        """,
        SHORT,
    )
    assert run.stopped in ("time", "memory")
    count = printed("""
        import os, time
        children = 0
        try:
            while True:
                if os.fork() == 0:
                    time.sleep(60)
                children += 1
        except BlockingIOError:
            print(children)
        """)
    assert int(count) == SandboxLimits().processes - 1


def test_threads_count_as_processes() -> None:
    count = printed("""
        import threading, time
        started = 0
        try:
            while True:
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
                started += 1
        except RuntimeError:
            print(started, flush=True)
        import os
        os._exit(0)
        """)
    assert int(count) == SandboxLimits().processes - 1  # its own thread is one of them


def test_processes_of_two_sandboxes_are_counted_apart() -> None:
    program = """
        import os, time
        for _ in range(10):
            if os.fork() == 0:
                time.sleep(60)
        time.sleep(0.5)
        print("all begun")
        """
    runs: list[SandboxRun] = []
    threads = [threading.Thread(target=lambda: runs.append(attempt(program))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [run.output for run in runs] == ["all begun\n"] * 3


# Memory


def test_memory_of_one_process_is_bounded() -> None:
    run = attempt("data = bytearray(600 << 20)", SandboxLimits(memory_mb=512))
    assert "MemoryError" in run.output


def test_memory_of_all_processes_together_is_bounded() -> None:
    run = attempt(
        """
        import os, time
        for _ in range(8):
            if os.fork() == 0:
                data = bytearray(40 << 20)
                time.sleep(60)
        time.sleep(60)
        """,
        SandboxLimits(seconds=20, memory_mb=128),
    )
    assert run.stopped == "memory"


@pytest.mark.parametrize("place", BOTH_PLACES)
def test_files_are_bounded_though_they_are_many(place: str) -> None:
    run = attempt(f"for number in range(40):\n    open(f'{place}/{{number}}', 'wb').write(bytes(1 << 20))")
    assert "No space left on device" in run.output


def test_one_file_is_bounded() -> None:
    assert "File too large" in attempt("open('/tmp/mine', 'wb').truncate(17 << 20)").output


# Output


@pytest.mark.parametrize(
    "program",
    [
        "while True: print('x' * 1000)",
        "import sys\nwhile True: sys.stderr.write('x' * 1000)",
        "import os\nwhile True: os.write(1, b'x' * 100_000)",
        "import os\nos.fork()\nos.fork()\nwhile True: os.write(1, b'x')",
        "print('x' * 10_000_000)",
    ],
)
def test_flood_of_output_ends_the_program(program: str) -> None:
    run = attempt(program)
    assert run.stopped == "output"
    assert len(run.output) == SandboxLimits().output_bytes


# Time


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time\ntime.sleep(60)",
        "import os\nos.close(1)\nos.close(2)\nimport time\ntime.sleep(60)",
        "import signal, time\nfor number in {*range(1, 32)} - {9, 19}: signal.signal(number, signal.SIG_IGN)\n"
        "while True: time.sleep(60)",
        "9 ** 9 ** 9",  # C code that looks at no signal
    ],
)
def test_program_ends_at_its_time_whatever_it_does(program: str) -> None:
    run = attempt(program, SandboxLimits(seconds=0.7))
    assert run.stopped == "time"
    assert run.exit_code is None


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
    assert processes_with(mark) == []


def test_program_whose_tool_was_given_up_is_ended() -> None:
    """The deadline of a tool call is raised in its thread: see `WorkerThreads`."""
    import ctypes

    from agentloop.errors import ToolTimeout

    mark = str(uuid.uuid4())
    program = f"import os, sys\nos.execv(sys.executable, ['python', '-c', 'import time; time.sleep(600)', {mark!r}])"

    def work() -> None:
        with pytest.raises(ToolTimeout):
            attempt(program, SandboxLimits(seconds=600.0))

    thread = threading.Thread(target=work)
    thread.start()
    while not processes_with(mark):
        time.sleep(0.01)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(ToolTimeout))
    thread.join()
    assert processes_with(mark) == []
