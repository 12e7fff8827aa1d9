"""An environment whose reference names the fault of its reply; imported by reward processes too."""

from rollstream.producers.tasks.base import Reply, Turns
from tests.tasks.odd_tasks import Odd

REPLIES: dict[str, tuple[object, object]] = {
    "negative": ((5, -1), ""),
    "float": ((5.0,), ""),
    "text for a token": (("5",), ""),
    "true": ((True,), ""),
    "too large": ((1 << 32,), ""),
    "text for tokens": ("55", ""),
    "nothing for tokens": (None, ""),
    "a number for a state": ((5,), 7),
    "broken text": ((5,), "\ud800"),
    "endless": (range(1 << 40), ""),
    "a state without end": ((5,), "x" * (1 << 20)),
    "fine": ([5, 6], "on"),
}


class OddReplies(Odd):
    def reply(self, reference: str, state: str, turns: Turns) -> Reply:
        return Reply(*REPLIES[reference])  # pyright: ignore
