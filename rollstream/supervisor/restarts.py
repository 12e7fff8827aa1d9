"""When a role that died is started again. Pure: times of deaths in, a delay or an end out."""

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_REFUSED = 2
"""Exit code of a role whose configuration or command line is wrong: the same again would not help.
"""
EXIT_UNSERVED = 3
"""Exit code of a role that was refused what it opens before it did anything; once more may help."""


def is_final_exit(code: int, before: int | None) -> bool:
    """Whether a role that exits with `code`, and `before` at its last death, is not to be started
    again: it refused, or was refused twice in a row.
    """
    return code == EXIT_REFUSED or code == before == EXIT_UNSERVED


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Back-off doubles from `first_s` to `longest_s`; more than `deaths_max` deaths within
    `within_s` end the run.
    """

    deaths_max: int = 5
    within_s: float = 60.0
    first_s: float = 0.25
    longest_s: float = 8.0

    def recent(self, deaths_s: Sequence[float], now_s: float) -> int:
        """Deaths that still count."""
        return sum(1 for death in deaths_s if now_s - death < self.within_s)

    def delay_s(self, deaths_s: Sequence[float], now_s: float) -> float | None:
        """Seconds to wait before the next start, or None when the role died too often."""
        recent = self.recent(deaths_s, now_s)
        if recent > self.deaths_max:
            return None
        return min(self.longest_s, self.first_s * 2 ** max(0, recent - 1))
