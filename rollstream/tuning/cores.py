"""Predicts a run whose rollouts and trainer compute on the same CPU cores (`on_shared_cores`).

The simulator gives each thread a core of its own. Where the threads together would use more than
there is, all of them are slowed by one factor, until what they use is what there is. So more
threads than cores generate and train no more; they only divide the cores differently.
"""

from collections.abc import Callable

from rollstream.simulator.experiment import Prediction

ROUNDS_MAX = 5  # simulations of one choice
CLOSE = 0.03  # of the cores: as near as the search for the factor comes
SHARED_TOLERANCE = 0.05
"""Share of the speed below which a gain is no reason for a change: one factor for all threads is
not more exact than that.
"""

Simulate = Callable[[float], Prediction | None]
"""Predicts the run whose decoding and training take so many times as long as alone."""


def on_shared_cores(
    simulate: Simulate, rollout_threads: int, trainer_threads: int, cores: float
) -> Prediction | None:
    """Returns the prediction with the threads' use of the `cores` taken into account; None if the
    run cannot be simulated.
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
