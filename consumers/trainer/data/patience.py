"""Warns when finished groups wait for annotations and none arrives. Their deadline closes them in
the end, but by default only after minutes.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

log = logging.getLogger(__name__)

NO_ANNOTATION_S = 30.0  # without any annotation while groups wait for one; also between two warnings


@dataclass(slots=True)
class AnnotationWatch:
    """`names` are the annotations that groups wait for. `quiet_since_s` is the latest of: the last
    annotation, the start of the wait, the last warning; 0 before the first call.
    """

    names: Sequence[str]
    quiet_since_s: float = 0.0

    def check(self, waiting: int, annotated_s: float, now_s: float) -> bool:
        """Log a warning if it is due, and return whether it was. `waiting` finished groups lack
        annotations; the last annotation was read at `annotated_s`.
        """
        if not waiting or not self.quiet_since_s:
            self.quiet_since_s = now_s
        self.quiet_since_s = max(self.quiet_since_s, annotated_s)
        if now_s - self.quiet_since_s < NO_ANNOTATION_S:
            return False
        log.warning(
            "%d finished groups wait for annotations (%s), and none came for %g s; is a scorer "
            "running? (`rollstream score CONFIG`, or scoring.count) Each group is closed at its "
            "deadline",
            waiting,
            ", ".join(self.names),
            NO_ANNOTATION_S,
        )
        self.quiet_since_s = now_s
        return True
