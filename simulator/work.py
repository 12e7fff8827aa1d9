"""A trajectory on its way, and what is left of it when it is finished."""

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Work:
    """`length` is how long the answer will be, which no planner may look at; `spans` are versions
    and the tokens generated under them (invariant 3), in order.
    """

    name: str
    group: int
    wave: int
    prompt: int
    length: int
    predicted: float = 0.0
    done: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    marked: int = 0
    """How many of the done tokens the spans have."""
    begun: int = 0
    """Step of its rollout, less `done`: valid while it runs."""
    attempt: int = 1
    moves: int = 0
    version: int = -1
    """Under `keep_version` the one that it began under; -1 before."""

    def cached(self) -> int:
        """Tokens in the cache when it runs from here."""
        return self.prompt + self.done

    def mark(self, version: int) -> None:
        """What was generated since the last span belongs to this version."""
        if self.done > self.marked:
            if self.spans and self.spans[-1][0] == version:
                before = self.spans.pop()[1]
                self.spans.append((version, before + self.done - self.marked))
            else:
                self.spans.append((version, self.done - self.marked))
            self.marked = self.done

    def lose(self, tokens: int) -> None:
        """The newest tokens, which no partial had."""
        self.done -= tokens
        self.marked = min(self.marked, self.done)
        over = sum(count for _, count in self.spans) - self.marked
        while over > 0:
            version, count = self.spans.pop()
            if count > over:
                self.spans.append((version, count - over))
            over -= count

    def restart(self) -> None:
        """From the prompt, under another version."""
        self.done = self.marked = 0
        self.spans.clear()
        self.version = -1
