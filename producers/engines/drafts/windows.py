"""How many tokens of a sequence are guessed next, from how the last guess went.

`additive` is RhymeRL's rule (arXiv 2508.18588): 2, two more after a full acceptance up to 32, back
to 2 after a rejection. `multiplicative` is what its authors' code does: twice as many up to 16, or
half as many down to 2. `marginal` has no window: what a token more is worth decides alone
(`plan.py`), up to 32.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class WindowRule:
    """A window lies in [`least`, `most`] and begins at `least`."""

    kind: Literal["additive", "multiplicative", "marginal"]
    least: int
    most: int

    def after(self, window: int, proposed: int, accepted: int) -> int:
        """The next window; where nothing was proposed it stays."""
        assert 0 <= accepted <= proposed, "nothing else can be accepted"
        if not proposed:
            return window
        if self.kind == "marginal":
            return self.most
        whole = accepted == proposed
        if self.kind == "additive":
            return min(window + 2, self.most) if whole else self.least
        return min(2 * window, self.most) if whole else max(window // 2, self.least)


ADDITIVE = WindowRule("additive", 2, 32)
MULTIPLICATIVE = WindowRule("multiplicative", 2, 16)
MARGINAL = WindowRule("marginal", 32, 32)
RULES = {rule.kind: rule for rule in (ADDITIVE, MULTIPLICATIVE, MARGINAL)}
