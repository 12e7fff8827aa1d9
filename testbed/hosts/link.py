"""The link between two sites: a process with a TUN device in the network of each, which carries
every IP packet from one to the other (`Link`). Each direction has a delay, a rate, a queue and a
share of lost packets, and the link can be cut: then every packet is lost and neither end is told.

It stands in for `netem`, which not every kernel has. The kernel's own TCP, segments of at most 1500
bytes, meets the delay and the losses; only the clock of the packets is this process's, so on a busy
machine some are late. As a program: `python -m testbed.hosts.link PID`, started in the network of
one site; PID is a process in the network of the other. It obeys lines on stdin.
"""

import fcntl
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, cast

from testbed.hosts.namespaces import enter_network

DELAY_S = 0.020  # each way
BYTES_PER_S = 200e6 / 8
LOSS = 1e-4
QUEUE_BYTES = 2_500_000  # a tenth of a second at full rate; beyond it packets are dropped
PACKET_BYTES = 1500
PRIORITY = -15  # a late packet would look like a slower link
DEVICES = ("site-a", "site-b")  # the TUN devices, each named after the site that it leads to
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000


@dataclass
class Direction:
    """Packets on their way to `device`. `sent` counts the bytes of all packets, also of lost ones,
    by port: the lower of a packet's two, which is the server's.
    """

    device: int
    choose: random.Random
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque[tuple[float, bytes]])
    free_s: float = 0.0
    dropped: int = 0
    sent: Counter[int] = field(default_factory=Counter[int])

    def enter(self, packet: bytes, now_s: float) -> None:
        """Take the packet unless it is lost; it arrives after its turn and the delay."""
        starts_s = max(now_s, self.free_s)
        is_full = (starts_s - now_s) * BYTES_PER_S > QUEUE_BYTES
        self.sent[_port(packet)] += len(packet)
        if is_full or self.choose.random() < LOSS:
            self.dropped += 1
            return
        self.free_s = starts_s + len(packet) / BYTES_PER_S
        self.waiting.append((self.free_s + DELAY_S, packet))

    def deliver(self, now_s: float) -> None:
        """Hand over the packets that are due; one for a device that is down is lost."""
        while self.waiting and self.waiting[0][0] <= now_s:
            try:
                os.write(self.device, self.waiting.popleft()[1])
            except OSError:
                self.dropped += 1


def _port(packet: bytes) -> int:
    """The lower port of a packet of TCP; 0 for others."""
    if packet[0] >> 4 != 4 or packet[9] != 6:
        return 0
    at = 4 * (packet[0] & 15)
    return min(struct.unpack_from("!HH", packet, at))


def _open_device(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def carry(devices: tuple[int, int], seed: int = 0) -> None:
    """Carry packets until stdin ends. Its lines are `cut` and `join`, which are answered by a line,
    and `counts`, answered by the bytes by direction and port as JSON.
    """
    choose = random.Random(seed)
    across = {devices[0]: Direction(devices[1], choose), devices[1]: Direction(devices[0], choose)}
    is_cut = False
    while True:
        due = [one.waiting[0][0] for one in across.values() if one.waiting]
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        ready, _, _ = select.select([0, *across], [], [], wait_s)
        now_s = time.monotonic()
        for device in ready:
            if device == 0:
                word = sys.stdin.readline().strip()
                if not word:
                    return
                is_cut = word == "cut" or (is_cut and word != "join")
                _answer(word, [across[one] for one in devices])
                continue
            for packet in _packets(device):
                if not is_cut:
                    across[device].enter(packet, now_s)
        for one in across.values():
            if is_cut:
                one.waiting.clear()
            one.deliver(now_s)


def _packets(device: int, most: int = 64) -> list[bytes]:
    found: list[bytes] = []
    try:
        while len(found) < most:
            found.append(os.read(device, 1 << 16))
    except BlockingIOError:
        pass
    return found


def _answer(word: str, directions: list[Direction]) -> None:
    counts = [{**one.sent, "dropped": one.dropped} for one in directions]
    print(json.dumps(counts) if word == "counts" else word, flush=True)


@dataclass(frozen=True)
class LinkCounts:
    """Bytes that were sent into the link from site A, and from site B, by the server's port."""

    from_a: Counter[int]
    from_b: Counter[int]
    dropped: int


class Link:
    """The link between the network of the calling thread (site A) and that of the process `pid`.
    Its ends are the devices `DEVICES`.
    """

    def __init__(self, pid: int) -> None:
        line = [sys.executable, "-m", "testbed.hosts.link", str(pid)]
        self._process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._expect("ready")

    def cut(self) -> None:
        """From now on every packet is lost, those on their way too."""
        self._say("cut")

    def join(self) -> None:
        """End the cut."""
        self._say("join")

    def counts(self) -> LinkCounts:
        found = cast(list[dict[str, Any]], json.loads(self._ask("counts")))
        dropped = sum(one.pop("dropped") for one in found)
        a, b = (Counter({int(port): count for port, count in one.items()}) for one in found)
        return LinkCounts(a, b, dropped)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _say(self, word: str) -> None:
        answer = self._ask(word)
        assert answer == word, answer

    def _ask(self, word: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self._line()

    def _expect(self, word: str) -> None:
        answer = self._line()
        assert answer == word, answer

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the link's process has ended"
        return line


def main(pid: int) -> None:
    os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    to_b = _open_device(DEVICES[1])
    there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    enter_network(there)
    to_a = _open_device(DEVICES[0])
    print("ready", flush=True)
    carry((to_b, to_a))


if __name__ == "__main__":
    main(int(sys.argv[1]))
