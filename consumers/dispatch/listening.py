"""The clock by which dispatch measures the silence of rollouts. Pure but for its two numbers.

A rollout is silent when others were heard for the heartbeat's time-out since its own last status.
So the clock advances only in a read that brought something from `status`, by the time since the
read before that did, and by a quarter of the time-out at most. What that stops:

- Dispatch itself stood still (SIGSTOP, a store or broker that hung) for 12 s, or the machine with
  all its rollouts did: its first read counts for a quarter, in which living rollouts send again.
- The broker was away for a minute: nobody could be heard, so nobody was silent.

A rollout that died alone, with nobody else to be heard, stays known; nobody could take its work.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Listening:
    """`now_s` is listening time; `step_s_max` what one read can add to it."""

    heard_s: float
    step_s_max: float
    now_s: float = 0.0

    def heard(self, at_s: float) -> None:
        """A read that began `at_s`, on dispatch's monotonic clock, brought something."""
        self.now_s += max(0.0, min(at_s - self.heard_s, self.step_s_max))
        self.heard_s = at_s
