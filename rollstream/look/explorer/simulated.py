"""Where a simulated run's data is (`SimulatedLocation`); `simulation.py` makes it. Light, because
every answer imports it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollstream.look.query.locate import RunLocation

if TYPE_CHECKING:
    from rollstream.simulator.results import SimulationResult


@dataclass(frozen=True, slots=True)
class SimulatedLocation(RunLocation):
    """Where the steps of a simulated run are, with the rest of it. Times are virtual seconds since
    its start.
    """

    share: float = 1.0
    result: "SimulationResult | None" = None

    @property
    def known(self) -> "SimulationResult":
        assert self.result is not None
        return self.result

    def settings(self) -> dict[str, str]:
        """Returns the figures that `simulate --json` prints, as text."""
        shares = self.known.lags.items()
        lags = ", ".join(f"{lag}: {share:.1%}" for lag, share in sorted(shares))
        line = {"rollout_share": self.share, **self.known.line(), "lags": lags}
        return {f"simulation.{name}": str(value) for name, value in line.items()}
