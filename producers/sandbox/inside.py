"""The first process of a sandbox that lives for several calls: it serves the three verbs to the
host over its stdin and stdout. The host starts it by its source text (`python3 -I -S -c`), so it
imports the standard library only. `pump` and `frame` are used by the host too.

It is process 1 of its PID namespace: programs cannot kill it, and it can kill all of them, which
it does at the end of each `exec`. It is not dumpable, so programs of the same user cannot trace it.
The files that it reads and writes are those of the sandbox; it follows no link.
"""

import contextlib
import json
import os
import select
import signal
import stat
import struct
import sys
import time

FRAME = struct.Struct(">IQ")  # bytes of the header, a JSON object, and of the body after it
HEADER_MAX = 1 << 20
CHUNK = 1 << 16
REAP_S = 60.0  # until all killed processes must be gone


def pump(
    ends: list[int],
    sinks: dict[int, bytearray],
    source: int | None,
    data: bytes,
    end_s: float,
    room: int,
) -> str:
    """Write `data` to the pipe `source`, and read the pipes `sinks` (descriptor → bytearray) until
    each is at its end or one of `ends` becomes readable. Returns "exit", or "time" after `end_s` of
    the monotonic clock, or "output" once more than `room` bytes came. Closes `source` (None: there
    is none) as soon as all was written or no process reads it.
    """
    poll = select.poll()
    open_sinks = set(sinks)
    for one in [*open_sinks, *ends]:
        os.set_blocking(one, False)
        poll.register(one, select.POLLIN)
    left_over = memoryview(data)
    if source is not None:
        os.set_blocking(source, False)
        poll.register(source, select.POLLOUT)
    try:
        while open_sinks:
            left = end_s - time.monotonic()
            if left <= 0:
                return "time"
            ready = [one for one, _ in poll.poll(min(left, 3600.0) * 1000 + 1)]
            for one in ready:
                if source is not None and one == source:
                    count = _written(source, left_over)
                    if count is None or count == len(left_over):
                        poll.unregister(source)
                        os.close(source)
                        source = None
                    else:
                        left_over = left_over[count:]
                elif one in open_sinks:
                    piece = _available(one)
                    if piece == b"":
                        open_sinks.discard(one)
                        poll.unregister(one)
                    elif piece:
                        room -= len(piece)
                        sinks[one] += piece[: len(piece) + min(0, room)]
                        if room < 0:
                            return "output"
            if any(one in ends for one in ready):
                return "exit"
        return "exit"
    finally:
        if source is not None:
            os.close(source)


def _written(source: int, data: memoryview) -> int | None:
    """Returns how many bytes the pipe took; None if no process reads it."""
    try:
        return os.write(source, data[:CHUNK])
    except BlockingIOError:
        return 0
    except OSError:
        return None


def _available(sink: int) -> bytes | None:
    """Returns the next bytes, b"" at the end of the pipe, None if there are none yet."""
    try:
        return os.read(sink, CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def frame(header: dict[str, object], body: bytes = b"") -> bytes:
    """Returns one message as bytes."""
    text = json.dumps(header).encode()
    return FRAME.pack(len(text), len(body)) + text + body


def _exactly(source: int, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = os.read(source, min(CHUNK, size - len(found)))
        if not piece:
            os._exit(0)  # the host is gone
        found += piece
    return bytes(found)


def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    _harden(sys.argv[1] if len(sys.argv) > 1 else "{}")
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for one in (0, 1, 2):
        os.dup2(nothing, one)
    _send(sink, {"ready": os.getpid()})
    verbs = {"exec": _exec, "read": _read, "write": _write}
    while True:
        header_size, body_size = FRAME.unpack(_exactly(source, FRAME.size))
        request = json.loads(_exactly(source, header_size))
        body = _exactly(source, body_size)
        try:
            header, answer = verbs[request.pop("verb")](body, **request)
        except OSError as error:
            _send(sink, {"error": error.strerror or str(error)})
        except ValueError as error:
            _send(sink, {"error": str(error)})
        else:
            _send(sink, header, answer)


def _send(sink: int, header: dict[str, object], body: bytes = b"") -> None:
    data = memoryview(frame(header, body))
    while data:
        data = data[os.write(sink, data[:CHUNK]) :]


def _harden(filters: str) -> None:
    """Become untraceable, and set the filter of system calls that is given for this architecture
    (hexadecimal, by the architecture's name), for all later processes too.
    """
    import ctypes

    control = ctypes.CDLL(None).prctl
    dumpable, seccomp, by_filter = 4, 22, 2
    if control(dumpable, 0, 0, 0, 0) != 0:
        os._exit(3)
    given = json.loads(filters).get(os.uname().machine)
    if given is not None:
        program = ctypes.create_string_buffer(bytes.fromhex(given))
        count, place = (len(program) - 1) // 8, ctypes.addressof(program)
        described = ctypes.create_string_buffer(struct.pack("@HP", count, place))
        if control(seccomp, by_filter, described, 0, 0) != 0:
            os._exit(5)


def _exec(
    stdin: bytes,
    command: list[str],
    environment: dict[str, str],
    folder: str,
    time_s: float,
    output_bytes: int,
) -> tuple[dict[str, object], bytes]:
    begun = time.monotonic()
    pipes = [os.pipe() for _ in range(3)]
    pid = os.fork()
    if pid == 0:
        _become(command, environment, folder, [pipes[0][0], pipes[1][1], pipes[2][1]])
    for one in (pipes[0][0], pipes[1][1], pipes[2][1]):
        os.close(one)
    program, sinks = os.pidfd_open(pid), {pipes[1][0]: bytearray(), pipes[2][0]: bytearray()}
    try:
        ended = pump([program], sinks, pipes[0][1], stdin, begun + time_s, output_bytes)
        if ended == "exit":  # its pipes may end before it does
            left = max(0.0, begun + time_s - time.monotonic())
            ended = "exit" if select.select([program], [], [], left)[0] else "time"
        code = _end_all(pid)
        room = output_bytes - sum(map(len, sinks.values()))
        if ended == "exit" and room > 0:  # what it wrote last
            flooded = pump([], sinks, None, b"", time.monotonic() + REAP_S, room) == "output"
            ended = "output" if flooded else "exit"
    finally:
        for one in (program, *sinks):
            os.close(one)
    out, errors = (bytes(sink) for sink in sinks.values())
    header = {"ended": ended, "code": code, "stdout": len(out)}
    return {**header, "seconds": time.monotonic() - begun}, out + errors


def _become(command: list[str], environment: dict[str, str], folder: str, pipes: list[int]) -> None:
    """Turn the forked process into the program."""
    try:
        os.setsid()
        for target, one in enumerate(pipes):
            os.dup2(one, target)
        os.closerange(3, 1024)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.chdir(folder)
        os.execvpe(command[0], command, environment)
    except (OSError, ValueError) as error:
        os.write(2, f"cannot start {command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def _end_all(program: int) -> int:
    """Kill every other process of the namespace, and reap all. Returns the program's exit code."""
    code, end_s = 128 + signal.SIGKILL, time.monotonic() + REAP_S
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == program:
            ended = os.waitstatus_to_exitcode(status)
            code = ended if ended >= 0 else 128 - ended
        if pid == 0:
            if time.monotonic() > end_s:
                os._exit(4)  # processes that cannot be killed: the host drops the sandbox
            time.sleep(0.0005)


def _walk(folder: str, path: str, make: bool) -> tuple[int, str]:
    """Returns a descriptor of the folder that holds the file, and the file's name. No link is
    followed; with `make`, missing folders are made.
    """
    at = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    *parents, name = path.split("/")
    for part in parents:
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=at)
        try:
            inner = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
        finally:
            os.close(at)
        at = inner
    return at, name


def _opened(folder: str, path: str, flags: int, make: bool) -> int:
    at, name = _walk(folder, path, make)
    try:
        # Without O_NONBLOCK a named pipe would block for ever.
        one = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644, dir_fd=at)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(one).st_mode):
        os.close(one)
        raise ValueError("not a regular file")
    return one


def _read(body: bytes, folder: str, path: str, bytes_max: int) -> tuple[dict[str, object], bytes]:
    one = _opened(folder, path, os.O_RDONLY, False)
    try:
        found = bytearray()
        while piece := os.read(one, CHUNK):
            found += piece
            if len(found) > bytes_max:
                raise ValueError(f"larger than {bytes_max} bytes")
        return {}, bytes(found)
    finally:
        os.close(one)


def _write(body: bytes, folder: str, path: str) -> tuple[dict[str, object], bytes]:
    one = _opened(folder, path, os.O_WRONLY | os.O_CREAT, True)
    try:
        os.ftruncate(one, 0)
        data = memoryview(body)
        while data:
            data = data[os.write(one, data) :]
    finally:
        os.close(one)
    return {}, b""


if __name__ == "__main__":
    _serve()
