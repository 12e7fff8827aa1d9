"""Real servers for tests and measurements, and a list of those that this session used.

Import as `tests.servers`, from everywhere: two names would be two lists.
"""

_USED: dict[str, str] = {}


def use(name: str, what: str) -> None:
    """Note that the server `name` is used; `what` is its version and address."""
    _USED[name] = what


def used() -> dict[str, str]:
    """What was used so far, by name: printed at the end of a test session."""
    return dict(_USED)
