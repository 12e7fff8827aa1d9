"""Rivals for the same objects, as threads or as processes: `python -m
tests.storage.stores.racing URL NUMBER KEYS TURNS` prints that it is ready, waits for a line, races,
and prints the keys it won.
"""

import subprocess
import sys
from collections.abc import Sequence

from rollstream.errors import ObjectExists, SwapLost
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from testbed.repository import ROOT


def won_keys(store: ObjectStore, number: int, keys: int) -> list[int]:
    """Returns the ones of `keys` objects that this rival created."""
    won: list[int] = []
    for key in range(keys):
        try:
            store.create(f"race/{key}", str(number).encode())
            won.append(key)
        except ObjectExists:
            pass
    return won


def count_up(store: ObjectStore, turns: int) -> None:
    """Increments the counter object so many times, one at a time."""
    done = 0
    while done < turns:
        data, etag = store.read("count")
        try:
            store.swap("count", str(int(data) + 1).encode(), etag)
            done += 1
        except SwapLost:
            pass


def check_won(store: ObjectStore, won: Sequence[Sequence[int]], keys: int) -> None:
    """Each object has exactly one winner, and the winner's content."""
    assert sorted(key for mine in won for key in mine) == list(range(keys))
    for number, mine in enumerate(won):
        assert all(store.get(f"race/{key}") == str(number).encode() for key in mine)


def check_races_of_processes(url: str, count: int, keys: int, turns: int) -> None:
    """One winner for each create, and no swap lost."""
    store = open_store(url)
    store.create("count", b"0")
    racers = [_racer(url, number, keys, turns) for number in range(count)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    won = [[int(key) for key in racer.communicate()[0].split()] for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * count
    check_won(store, won, keys)
    assert store.get("count") == str(count * turns).encode()


def _racer(url: str, number: int, keys: int, turns: int) -> "subprocess.Popen[str]":
    line = [
        sys.executable,
        "-m",
        "tests.storage.stores.racing",
        url,
        *map(str, (number, keys, turns)),
    ]
    return subprocess.Popen(
        line, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def main() -> None:
    url, *numbers = sys.argv[1:]
    number, keys, turns = map(int, numbers)
    store = open_store(url)
    print("ready", flush=True)
    sys.stdin.readline()
    print(*won_keys(store, number, keys))
    count_up(store, turns)


if __name__ == "__main__":
    main()
