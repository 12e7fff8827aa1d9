"""Variables of the environment for a while, and a check that a test leaves them as they were."""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager

SET_ONCE = frozenset({"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "ARROW_DEFAULT_MEMORY_POOL"})
"""Set for all that follows in a process: by S3 servers at their start, by readers of Arrow."""


@contextmanager
def environment(values: Mapping[str, str | None]) -> Generator[None]:
    """Sets variables, and removes those of value None; all are as before at the end."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def changed_since(before: Mapping[str, str]) -> list[str]:
    """Returns the names of variables that were removed, added or changed. A server's credentials
    may appear and replace another one's; without them all tests after it would ask as nobody.
    """
    now, names = os.environ, (before.keys() | os.environ.keys()) - {"PYTEST_CURRENT_TEST"}
    different = {name for name in names if before.get(name) != now.get(name)}
    return sorted(name for name in different if not (name in SET_ONCE and name in now))
