"""How busy the cores of this machine are, for advice that would add work to them."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# A few steps of a small run.
SAMPLE_S = 10.0


@dataclass(frozen=True, slots=True)
class MachineUse:
    """Cores that a run may use, and how many are busy with any work."""

    cores: float
    busy_cores: float

    @property
    def spare_cores(self) -> float:
        return max(0.0, self.cores - self.busy_cores)


class CoreClock:
    """The core clock of the cores that this process may use: those of its affinity, or the quota of
    its control group. `root` is `/`, for tests another folder.
    """

    def __init__(
        self, root: Path = Path("/"), monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._proc, self._group = root / "proc/stat", root / "sys/fs/cgroup"
        self._monotonic = monotonic
        self._before: tuple[float, float] | None = None
        self._use: MachineUse | None = None

    def use(self) -> MachineUse | None:
        """Returns the use between two calls at least `SAMPLE_S` apart; None before there are two,
        and on a system without these files.
        """
        now_s = self._monotonic()
        if self._before is not None and now_s - self._before[0] < SAMPLE_S:
            return self._use
        try:
            cores, busy_s = self._read()
        except (OSError, ValueError, IndexError):
            return None
        if self._before is not None:
            passed_s = now_s - self._before[0]
            self._use = MachineUse(cores, max(0.0, busy_s - self._before[1]) / passed_s)
        self._before = now_s, busy_s
        return self._use

    def _read(self) -> tuple[float, float]:
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        lines = [line.split() for line in self._proc.read_text().splitlines()]
        each = {int(w[0][3:]): w for w in lines if w[0].startswith("cpu") and w[0] != "cpu"}
        core_lines = [each[core] for core in each if usable is None or core in usable]
        quota = self._quota()
        if quota is not None and quota < len(core_lines):
            stat = (self._group / "cpu.stat").read_text().split()
            return quota, int(stat[stat.index("usage_usec") + 1]) / 1e6
        ticks = sum(sum(map(int, w[1:4])) + sum(map(int, w[6:9])) for w in core_lines)
        return float(len(core_lines)), ticks / os.sysconf("SC_CLK_TCK")

    def _quota(self) -> float | None:
        try:
            quota, period = (self._group / "cpu.max").read_text().split()
        except (OSError, ValueError):
            return None
        return None if quota == "max" else int(quota) / int(period)
