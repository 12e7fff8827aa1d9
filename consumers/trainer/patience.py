"""Says so when finished groups wait for annotations that nobody writes; their deadline closes them
in the end, but by default that takes minutes.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

log = logging.getLogger(__name__)

QUIET_S = 30.0  # without any annotation, while groups wait for some; also between two warnings


@dataclass(slots=True)
class Patience:
    """`names` are the annotations that groups wait for; `quiet_since_s` is when the last one came,
    or the wait or the last warning began.
    """

    names: Sequence[str]
    quiet_since_s: float = 0.0

    def look(self, waiting: int, noted_s: float, now_s: float) -> bool:
        """Whether it warned: `waiting` finished groups lack annotations, the last came
        at `noted_s`.
        """
        if not waiting or not self.quiet_since_s:
            self.quiet_since_s = now_s
        self.quiet_since_s = max(self.quiet_since_s, noted_s)
        if now_s - self.quiet_since_s < QUIET_S:
            return False
        log.warning(
            "%d finished groups wait for annotations (%s), and none came for %g s; is a scorer "
            "running? (`rollstream score CONFIG`, or scoring.count) Each is closed at its deadline",
            waiting,
            ", ".join(self.names),
            QUIET_S,
        )
        self.quiet_since_s = now_s
        return True
