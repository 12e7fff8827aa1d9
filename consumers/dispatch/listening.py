"""The clock by which dispatch measures the silence of rollouts.

A rollout is silent when records of other rollouts were read for the heartbeat's time-out since its
own last status. So the clock advances only in a read that returned something from `status`, by the
time since the previous such read, and by a quarter of the time-out at most. Two failures that this
handles:

- Dispatch itself stood still (SIGSTOP, a store or broker that hung) for 12 s, or the machine with
  all its rollouts did: its first read counts for a quarter of the time-out, in which living
  rollouts send again.
- The broker was unreachable for a minute: no status could be read, so no rollout became silent.

A single rollout that died stays known while no other rollout sends; no other one could take its
work.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class SilenceClock:
    """Listening time is `now_s`, in seconds; one read adds at most `step_s_max` to it."""

    heard_s: float
    step_s_max: float
    now_s: float = 0.0

    def heard(self, at_s: float) -> None:
        """A read that started `at_s`, on dispatch's monotonic clock, returned a status."""
        self.now_s += max(0.0, min(at_s - self.heard_s, self.step_s_max))
        self.heard_s = at_s
