"""Two questions about a disk: whether it is on another machine, and whether a file is safely on it."""

import os
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "coda", "ncpfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs"),
    *("fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone"),
)


def network_file_system(folder: Path) -> str | None:
    """The type of the network file system that holds a folder; None: a local one, or unknown (only Linux lists mounts).

    SQLite can't rely on locks and shared memory over a network: https://www.sqlite.org/faq.html#q5
    """
    try:
        device = os.stat(folder).st_dev
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        # ID PARENT MAJOR:MINOR ROOT POINT OPTIONS TAGS... - TYPE SOURCE OPTIONS
        mount, _, kind = line.partition(" - ")
        if mount.split()[2:3] == [number]:
            name = kind.split(" ")[0]
            return name if name in _NETWORK else None
    return None


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
