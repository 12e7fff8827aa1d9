"""Predicts a run whose rollouts and trainer share CPU cores: where the threads would use more than
there are, all are slowed by one factor.
"""

from collections.abc import Callable

from rollstream.simulator.experiment import Prediction

ROUNDS_MAX = 5  # simulations of one choice
CLOSE = 0.03  # of the cores: as near as the search for the factor comes
SHARED_TOLERANCE = 0.05
"""As a share of the speed: smaller gains are no reason for a change, since one factor is not more
exact.
"""

Simulate = Callable[[float], Prediction | None]


def on_shared_cores(
    simulate: Simulate, rollout_threads: int, trainer_threads: int, cores: float
) -> Prediction | None:
    """Returns the prediction with the threads' use of the `cores`; None if the run cannot be
    simulated.
    """
    slower = 1.0
    prediction = simulate(slower)
    for _ in range(ROUNDS_MAX - 1):
        if prediction is None:
            return None
        busy = rollout_threads * (1 - prediction.idle_share)
        busy += trainer_threads * (1 - prediction.trainer_idle_share)
        used = busy / slower / cores
        if abs(used - 1) <= CLOSE or (used < 1 and slower == 1.0):
            return prediction
        slower = max(1.0, slower * used)
        prediction = simulate(slower)
    return prediction
