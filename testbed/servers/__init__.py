"""Real servers for tests and measurements, and a list of those that this session used.

Import as `testbed.servers`, from everywhere: two names would be two lists.
"""

import fcntl
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from testbed.repository import ROOT

CACHE = ROOT / ".servers"
_USED: dict[str, str] = {}


@contextmanager
def installing() -> Generator[None]:
    """One process at a time fetches or builds servers; who waited finds them there."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def use(name: str, what: str) -> None:
    """Note that the server `name` is used; `what` is its version and address."""
    _USED[name] = what


def used_elsewhere(there: Mapping[str, str]) -> None:
    """What another process of this session used; its server is another one."""
    for name, what in there.items():
        known = _USED.get(name)
        _USED[name] = what if known in (None, what) else f"{known}, {what}"


def used() -> dict[str, str]:
    """What was used so far, by name: printed at the end of a test session."""
    return dict(_USED)
