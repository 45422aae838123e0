"""What a disk must be asked: whether it is of another machine, and to have written what it was given."""

import os
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "coda", "ncpfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs"),
    *("fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone"),
)


def network_file_system(folder: Path) -> str | None:
    """The type of the network file system a folder stands on, whose locks and shared memory SQLite can't rely on
    (https://www.sqlite.org/faq.html#q5); None: a local one, or unknown: only Linux lists mounts for everybody."""
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
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
