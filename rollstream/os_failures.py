"""Failure and remedy by error number of the operating system."""

import errno
import os
import resource
import tempfile
from pathlib import Path

_ROOM = "free space on its disk (df -h), or inodes (df -i)"
_OURS = "choose a folder that this user may write to, or give it the rights"
_THERE = "another file or folder is in the way"
_ADVICE = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: "the disk quota of this user is used up: delete files or raise it (quota -s)",
    errno.EFBIG: "no file may grow larger here: raise the limit (ulimit -f)",
    errno.EROFS: "this file system is read-only: choose a folder on another one",
    errno.EACCES: _OURS,
    errno.EPERM: _OURS,
    errno.ENFILE: "the whole machine may open no more files: raise fs.file-max, or end programs",
    errno.ENAMETOOLONG: "a file system takes 255 bytes a name and 4095 a path: choose shorter ones",
    errno.ELOOP: "a link is in the way, or links lead in a circle: name the folder itself",
    errno.EIO: "the disk failed: look at the kernel's log (dmesg), and check the disk",
    errno.ESTALE: "the network file system has lost the file: mount it again",
    errno.ENOTCONN: "the file system is mounted, but its server is gone: mount it again",
    errno.ENODEV: "the device is gone: mount it again",
    errno.ENXIO: "the device is gone: mount it again",
    errno.ENOMEM: "no memory is left: end other programs, or use a machine with more",
    errno.EAGAIN: "this user may start no more processes or threads: raise the limit (ulimit -u)",
    errno.ENOENT: "nothing has this name: correct the path",
    errno.ENOTDIR: _THERE,
    errno.EISDIR: _THERE,
    errno.EEXIST: _THERE,
    errno.ENOTEMPTY: _THERE,
    errno.EINVAL: "this file system cannot do that: choose a folder on a local disk",
    errno.EOPNOTSUPP: "this file system cannot do that: choose a folder on a local disk",
    errno.ENOLCK: "this file system has no locks: choose a folder on a local disk",
    errno.EBUSY: "another program uses it: end that program",
    errno.ETXTBSY: "another program runs it: end that program",
    errno.EMLINK: "a file has too many links here: choose another folder",
    errno.EXDEV: "both must be on one file system",
    errno.EADDRINUSE: "another program listens there: choose another port",
    errno.EADDRNOTAVAIL: "this machine has no such address: correct the host",
    errno.ECONNREFUSED: "no program listens there: start it, or correct host and port",
    errno.ETIMEDOUT: "no answer came: check the network and firewalls between the hosts",
    errno.EHOSTUNREACH: "no way leads there: check the network and firewalls between the hosts",
    errno.ENETUNREACH: "no way leads there: check the network of this machine",
}
_OF_A_PROGRAM = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EINVAL}
_FILES_ENOUGH = 4096
# More than the rest of a block that a full disk may have.
_PROBE_BYTES = 1 << 16


def explain_os_error(error: OSError) -> str:
    """The failure in the system's words, and the remedy."""
    number = error.errno
    said = error.strerror or str(error) or type(error).__name__
    if number == errno.EMFILE:
        files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        advice = (
            f"this process may open {files_max} files: raise the limit (ulimit -n {_FILES_ENOUGH})"
        )
    else:
        advice = _ADVICE.get(number or 0, "")
    return f"{said}; {advice}" if advice else said


def is_of_the_machine(error: OSError) -> bool:
    """Whether the machine is the cause, not a mistake of a program or of a name."""
    number = error.errno
    is_listed = number == errno.EMFILE or number in _ADVICE
    return is_listed and number not in _OF_A_PROGRAM


def failure_to_open(path: Path) -> OSError | None:
    """Returns the error with which the system refuses to open `path` for writing, for libraries
    that report no reason. Nothing is made.
    """
    try:
        if path.exists():
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        else:
            os.close(os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC))
            if not os.access(path.parent, os.W_OK | os.X_OK):
                return PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path.parent))
    except OSError as error:
        return error
    return None


def failure_to_write(folder: Path) -> OSError | None:
    """Returns the error with which the system refuses to write a temporary file."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        return error
    return None
