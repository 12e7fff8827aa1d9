"""The host starts it by its source text, so it imports the standard library only. As process 1 of
its PID namespace programs cannot kill it, and it kills all of them at the end of each `exec`.
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
    """Writes `data` to the pipe `source`, and reads the pipes `sinks` until all, or one of `ends`,
    are at their end. Returns "exit", "time" after `end_s` of the monotonic clock, or "output" after
    more than `room` bytes.
    """
    poll = select.poll()
    open_sinks = set(sinks)
    for descriptor in [*open_sinks, *ends]:
        os.set_blocking(descriptor, False)
        poll.register(descriptor, select.POLLIN)
    left_over = memoryview(data)
    if source is not None:
        os.set_blocking(source, False)
        poll.register(source, select.POLLOUT)
    try:
        while open_sinks:
            remaining_s = end_s - time.monotonic()
            if remaining_s <= 0:
                return "time"
            ready = [descriptor for descriptor, _ in poll.poll(min(remaining_s, 3600.0) * 1000 + 1)]
            for descriptor in ready:
                if source is not None and descriptor == source:
                    count = _written(source, left_over)
                    if count is None or count == len(left_over):
                        poll.unregister(source)
                        os.close(source)
                        source = None
                    else:
                        left_over = left_over[count:]
                elif descriptor in open_sinks:
                    piece = _available(descriptor)
                    if piece == b"":
                        open_sinks.discard(descriptor)
                        poll.unregister(descriptor)
                    elif piece:
                        room -= len(piece)
                        sinks[descriptor] += piece[: len(piece) + min(0, room)]
                        if room < 0:
                            return "output"
            if any(descriptor in ends for descriptor in ready):
                return "exit"
        return "exit"
    finally:
        if source is not None:
            os.close(source)


def _written(source: int, data: memoryview) -> int | None:
    try:
        return os.write(source, data[:CHUNK])
    except BlockingIOError:
        return 0
    except OSError:
        # No process reads the pipe.
        return None


def _available(sink: int) -> bytes | None:
    try:
        return os.read(sink, CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def frame(header: dict[str, object], body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return FRAME.pack(len(text), len(body)) + text + body


def _exactly(source: int, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        piece = os.read(source, min(CHUNK, size - len(received)))
        if not piece:
            os._exit(0)  # the host is gone
        received += piece
    return bytes(received)


def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    _harden(sys.argv[1] if len(sys.argv) > 1 else "{}")
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
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
    import ctypes

    control = ctypes.CDLL(None).prctl
    dumpable, seccomp, by_filter = 4, 22, 2
    # Programs of the same user cannot trace a process that is not dumpable.
    if control(dumpable, 0, 0, 0, 0) != 0:
        os._exit(3)
    # Filters are hexadecimal, by architecture; this one holds for all later processes too.
    filter_hex = json.loads(filters).get(os.uname().machine)
    if filter_hex is not None:
        program = ctypes.create_string_buffer(bytes.fromhex(filter_hex))
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
    for descriptor in (pipes[0][0], pipes[1][1], pipes[2][1]):
        os.close(descriptor)
    program, sinks = os.pidfd_open(pid), {pipes[1][0]: bytearray(), pipes[2][0]: bytearray()}
    try:
        ended = pump([program], sinks, pipes[0][1], stdin, begun + time_s, output_bytes)
        if ended == "exit":  # its pipes may end before it does
            remaining_s = max(0.0, begun + time_s - time.monotonic())
            ended = "exit" if select.select([program], [], [], remaining_s)[0] else "time"
        code = _end_all(pid)
        room = output_bytes - sum(map(len, sinks.values()))
        if ended == "exit" and room > 0:  # what it wrote last
            flooded = pump([], sinks, None, b"", time.monotonic() + REAP_S, room) == "output"
            ended = "output" if flooded else "exit"
    finally:
        for descriptor in (program, *sinks):
            os.close(descriptor)
    out, errors = (bytes(sink) for sink in sinks.values())
    header = {"ended": ended, "code": code, "stdout": len(out)}
    return {**header, "seconds": time.monotonic() - begun}, out + errors


def _become(command: list[str], environment: dict[str, str], folder: str, pipes: list[int]) -> None:
    try:
        os.setsid()
        for target, descriptor in enumerate(pipes):
            os.dup2(descriptor, target)
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
    # No link is followed on the way.
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
        descriptor = os.open(
            name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644, dir_fd=at
        )
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("not a regular file")
    return descriptor


def _read(body: bytes, folder: str, path: str, bytes_max: int) -> tuple[dict[str, object], bytes]:
    descriptor = _opened(folder, path, os.O_RDONLY, False)
    try:
        content = bytearray()
        while piece := os.read(descriptor, CHUNK):
            content += piece
            if len(content) > bytes_max:
                raise ValueError(f"larger than {bytes_max} bytes")
        return {}, bytes(content)
    finally:
        os.close(descriptor)


def _write(body: bytes, folder: str, path: str) -> tuple[dict[str, object], bytes]:
    descriptor = _opened(folder, path, os.O_WRONLY | os.O_CREAT, True)
    try:
        os.ftruncate(descriptor, 0)
        data = memoryview(body)
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)
    return {}, b""


if __name__ == "__main__":
    _serve()
