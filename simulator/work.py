"""A simulated trajectory, from admission to training."""

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class SimulatedTrajectory:
    """`length` is the final length of the answer, hidden from all planners. `spans` are (version,
    tokens generated under it) in order (invariant 3).
    """

    name: str
    group: int
    wave: int
    prompt: int
    length: int
    predicted: float = 0.0
    done: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    span_tokens: int = 0
    """Number of `done` tokens that are in `spans`."""
    begun: int = 0
    """Step of its replica at which it started, minus `done`; valid while it runs."""
    attempt: int = 1
    moves: int = 0
    version: int = -1
    """Under `keep_version` the version that it started under; -1 before."""

    def cache_tokens(self) -> int:
        """Cache tokens that it needs when it runs from here."""
        return self.prompt + self.done

    def close_span(self, version: int) -> None:
        """Add the tokens since the last span to a span of this version."""
        if self.done > self.span_tokens:
            if self.spans and self.spans[-1][0] == version:
                before = self.spans.pop()[1]
                self.spans.append((version, before + self.done - self.span_tokens))
            else:
                self.spans.append((version, self.done - self.span_tokens))
            self.span_tokens = self.done

    def remove_newest(self, tokens: int) -> None:
        """Remove the newest tokens, which no partial holds."""
        self.done -= tokens
        self.span_tokens = min(self.span_tokens, self.done)
        over = sum(count for _, count in self.spans) - self.span_tokens
        while over > 0:
            version, count = self.spans.pop()
            if count > over:
                self.spans.append((version, count - over))
            over -= count

    def restart(self) -> None:
        """Start again from the prompt, under another version."""
        self.done = self.span_tokens = 0
        self.spans.clear()
        self.version = -1
