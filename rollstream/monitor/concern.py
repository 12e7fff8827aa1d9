"""A warning: a kind for programs, the problem, and the advice."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunWarning:
    """`kind` is stable while the problem lasts; `what` is the problem, `do` the advice."""

    kind: str
    what: str
    do: str
