"""The largest draft length of a sequence, from the acceptance of its last draft.

`additive` is RhymeRL's rule (arXiv 2508.18588): 2, two more after a full acceptance up to 32, back
to 2 after a rejection. `multiplicative` is the rule in its authors' code: twice as many up to 16,
or half as many down to 2. `marginal` has a constant window of 32: only the marginal benefit of a
token limits the length (`plan.py`).
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class WindowRule:
    """A window is within [`least`, `most`] and starts at `least`."""

    kind: Literal["additive", "multiplicative", "marginal"]
    least: int
    most: int

    def after(self, window: int, proposed: int, accepted: int) -> int:
        """The next window; unchanged if nothing was proposed."""
        assert 0 <= accepted <= proposed, "at most the proposed tokens are accepted"
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
WINDOW_RULES = {rule.kind: rule for rule in (ADDITIVE, MULTIPLICATIVE, MARGINAL)}
