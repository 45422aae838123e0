"""A seccomp filter for the sandbox, made by libseccomp, which knows the numbers of system calls on each machine.

What is refused is memory that no limit counts (System V segments and queues, files without a name), and what makes the
kernel do more than a program needs (io_uring, bpf, keys, other processes' memory, namespaces, mounts).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os

from agentloop.environments.sandbox.sandbox_run import SandboxFailed

REFUSED = (
    *("shmget", "shmat", "shmctl", "semget", "msgget", "mq_open", "memfd_create", "memfd_secret"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "bpf", "perf_event_open", "userfaultfd"),
    *("add_key", "request_key", "keyctl", "ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd"),
    *("unshare", "setns", "mount", "umount2", "pivot_root", "move_mount", "open_tree", "fsopen", "mount_setattr"),
    *("name_to_handle_at", "open_by_handle_at", "personality", "syslog", "quotactl"),
)
"""They fail with EPERM."""
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_UNKNOWN = -1


def load_libseccomp() -> ctypes.CDLL | None:
    """None where there is none."""
    name = ctypes.util.find_library("seccomp") or "libseccomp.so.2"
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return None
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = [ctypes.c_uint32]
    library.seccomp_syscall_resolve_name.argtypes = [ctypes.c_char_p]
    library.seccomp_rule_add.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint]
    library.seccomp_export_bpf.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.seccomp_release.argtypes = [ctypes.c_void_p]
    return library


def build_filter(library: ctypes.CDLL) -> bytes:
    """The filter as the kernel takes it."""
    context = library.seccomp_init(_ALLOW)
    file = os.memfd_create("seccomp")
    try:
        for name in REFUSED:
            number = library.seccomp_syscall_resolve_name(name.encode())
            # An older libseccomp does not know the newest names, and a kernel as old as it has none of them.
            if number != _UNKNOWN and (code := library.seccomp_rule_add(context, _REFUSE, number, 0)):
                raise SandboxFailed(f"libseccomp takes no rule about {name} (code {code})")
        if code := library.seccomp_export_bpf(context, file):
            raise SandboxFailed(f"libseccomp writes no filter (code {code})")
        return os.pread(file, os.fstat(file).st_size, 0)
    finally:
        library.seccomp_release(context)
        os.close(file)
