"""What a warning is: a kind for programs, what is the matter, and what to do about it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Concern:
    """`kind` stays the same while the matter lasts; `what` and `do` are one sentence each."""

    kind: str
    what: str
    do: str
