"""What attempts to leave a sandbox aim at, on this machine (`Host`): each target is real, and each
proof reads the target itself. The secret token is in none of the targets that programs are given.
"""

import ctypes
import json
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from testbed.servers.guard import mark_variable

SECRET_VARIABLE = "ESCAPE_SECRET"
_IPC_CREATE, _IPC_REMOVE = 0o1000, 0
_ADD_KEY_AND_KEYCTL = {"x86_64": (248, 250), "aarch64": (217, 219)}
_USER_KEYRING, _SET_TIMEOUT, _KEY_S = -4, 15, 3600
_ANSWERS = "import sys; sys.stdout.write(sys.stdin.read())"
_ANSWER_S = 60.0
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.shmat.restype = ctypes.c_void_p
_LIBC.shmdt.argtypes = [ctypes.c_void_p]


class Host:
    """The targets, as long as the `with` block runs. `token` is the secret that an attempt may not
    learn; `mark` is a word that programs are given, to write or send it somewhere.
    """

    def __enter__(self) -> Self:
        self.token, self.mark = f"token-{secrets.token_hex(12)}", f"mark-{secrets.token_hex(8)}"
        self.folder = Path(tempfile.mkdtemp(prefix="escape-"))
        self.folder.chmod(0o755)
        self.secret = self.folder / "secret"
        self.secret.write_text(self.token)
        self.secret.chmod(0o644)
        self._before = os.environ.get(SECRET_VARIABLE)
        os.environ[SECRET_VARIABLE] = self.token
        self.open_secret = os.open(self.secret, os.O_RDONLY)
        os.set_inheritable(self.open_secret, True)
        self.tcp, self.udp = socket.socket(), socket.socket(type=socket.SOCK_DGRAM)
        self.abstract = socket.socket(socket.AF_UNIX)
        self.tcp.bind(("127.0.0.1", 0))
        self.udp.bind(("127.0.0.1", 0))
        self.abstract.bind(f"\0{self.mark}")
        for listener in (self.tcp, self.abstract):
            listener.listen()
        self.terminal, self._slave = os.openpty()
        os.set_inheritable(self._slave, True)
        self.victim = subprocess.Popen(
            [sys.executable, "-c", _ANSWERS, self.mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={SECRET_VARIABLE: self.token, **mark_variable()},
        )
        self._shared, self.shared_key = _shared_memory(self.token)
        self._add_key()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.victim.kill()
        self.victim.communicate()
        for process in self.survivors():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for one in (self.open_secret, self.terminal, self._slave):
            os.close(one)
        for listener in (self.tcp, self.udp, self.abstract):
            listener.close()
        _LIBC.shmctl(self._shared, _IPC_REMOVE, None)
        os.environ.pop(SECRET_VARIABLE, None)
        if self._before is not None:
            os.environ[SECRET_VARIABLE] = self._before
        for place in self._places():
            (place / self.mark).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def targets(self) -> bytes:
        """Returns what a program is given: where the targets are, never the token."""
        return json.dumps(
            {
                "mark": self.mark,
                "secret": str(self.secret),
                "folder": str(self.folder),
                "tcp": self.tcp.getsockname()[1],
                "udp": self.udp.getsockname()[1],
                "abstract": self.mark,
                "victim": self.victim.pid,
                "host": os.getpid(),
                "shared": self.shared_key,
                "terminal": os.ttyname(self._slave),
                "inode": self.folder.stat().st_ino,
                "bwrap": shutil.which("bwrap") or "",
            }
        ).encode()

    def was_called(self) -> bool:
        """Returns whether a listener was reached."""
        ready = select.select([self.tcp, self.udp, self.abstract], [], [], 0)[0]
        return bool(ready)

    def was_written(self) -> bool:
        """Returns whether the mark or a file was written where only the host writes."""
        return any((place / self.mark).exists() for place in self._places())

    def was_typed(self) -> bool:
        """Returns whether the terminal shows the mark, or got it as input.

        The kernel passes on what is written to a terminal later, and in order: what comes before
        the host's own last word is all that the attempt wrote.
        """
        last, shown = b"last-word", b""
        os.write(self._slave, last)
        while last not in shown and select.select([self.terminal], [], [], _ANSWER_S)[0]:
            shown += os.read(self.terminal, 65_536)
        return self.mark.encode() in shown

    def is_victim_harmed(self) -> bool:
        """Returns whether the victim no longer answers.

        A signal that is sent but not yet handled leaves a process that looks alive. It cannot
        answer, because the kernel handles the signal before the process runs again.
        """
        try:
            answer, _ = self.victim.communicate(b"question", timeout=_ANSWER_S)
        except subprocess.TimeoutExpired:
            return True
        return answer != b"question"

    def survivors(self) -> list[psutil.Process]:
        """Returns living processes that have the mark among their arguments."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                lives = process.status() != psutil.STATUS_ZOMBIE
                if lives and process.pid != self.victim.pid and self.mark in process.cmdline():
                    found.append(process)
        return found

    def _places(self) -> list[Path]:
        """Returns folders in which a program may have left a file named by the mark."""
        places = (self.folder, Path("/"), Path("/etc"), Path("/usr"), Path("/root"), Path("/tmp"))
        return [place for place in places if os.access(place, os.W_OK | os.X_OK)]

    def _add_key(self) -> None:
        """Puts the token into the key ring of this user."""
        data = self.token.encode()
        call = _ADD_KEY_AND_KEYCTL.get(os.uname().machine)
        if call is not None:
            name = self.mark.encode()
            size = ctypes.c_size_t(len(data))
            key = _LIBC.syscall(call[0], b"user", name, data, size, _USER_KEYRING)
            _LIBC.syscall(call[1], _SET_TIMEOUT, key, _KEY_S)


def _shared_memory(token: str) -> tuple[int, int]:
    """Makes a System V segment that holds the token, for everybody. Returns its number and key."""
    key = secrets.randbelow(1 << 30) + 1
    number = _LIBC.shmget(key, 4096, _IPC_CREATE | 0o666)
    place = _LIBC.shmat(number, None, 0)
    ctypes.memmove(place, token.encode(), len(token))
    _LIBC.shmdt(place)
    return number, key
