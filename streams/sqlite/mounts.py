"""Detects whether a folder is on a network file system, which SQLite's WAL does not support: it
needs memory shared between its users.
"""

from pathlib import Path

MOUNTS = Path("/proc/self/mounts")
NETWORK_TYPES = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb",
        "smb2",
        "smb3",
        "smbfs",
        "9p",
        "afs",
        "ceph",
        "lustre",
        "glusterfs",
        "beegfs",
        "gpfs",
        "ncpfs",
        "davfs",
    }
)
NETWORK_FUSE = frozenset(
    {
        "fuse.sshfs",
        "fuse.glusterfs",
        "fuse.s3fs",
        "fuse.rclone",
        "fuse.davfs2",
        "fuse.ceph",
        "fuse.gcsfuse",
        "fuse.goofys",
        "fuse.mount-s3",
        "fuse.juicefs",
    }
)


def network_file_system(folder: str, mounts: str) -> str | None:
    """The type of the network file system that holds the absolute path `folder`; None for a local
    one.

    `mounts` is the text of Linux's /proc/self/mounts. The longest mount point above `folder`
    counts; of equal ones the last, because it hides the earlier ones.
    """
    best, found = -1, None
    for line in mounts.splitlines():
        words = line.split(" ")
        if len(words) < 3:
            continue
        point = _unescaped(words[1])
        inside = folder == point or folder.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, found = len(point), words[2]
    return found if found in NETWORK_TYPES | NETWORK_FUSE else None


def _unescaped(point: str) -> str:
    """Replace the octal escapes that this file uses for blanks, tabs, newlines and backslashes."""
    for escape, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        point = point.replace(escape, character)
    return point


def read_mounts() -> str:
    """This machine's mounts; empty if the system has no such file, so that no folder counts as a
    network folder.
    """
    return MOUNTS.read_text(errors="replace") if MOUNTS.exists() else ""
