"""The time of many decode steps, and the steps within a time. While no trajectory joins or leaves,
the cache grows by one token per row and step, so times sum in closed form.
"""

from math import ceil, sqrt

from rollstream.producers.engines.roofline import Roofline


def seconds_of_steps(roofline: Roofline, rows: int, kv_tokens: float, steps: int) -> float:
    """Returns the seconds of steps of the same rows: up to rounding, the last value of
    `Roofline.ends_s`.
    """
    free = min(steps, _compute_bound_steps(roofline, rows, kv_tokens))
    reading = steps - free
    row_s, step = rows * roofline.row_s, rows * roofline.kv_token_s
    first = roofline.weights_s + (kv_tokens + rows * free) * roofline.kv_token_s
    both = 0.0 if roofline.overlapping else row_s * steps
    read = reading * first + step * reading * (reading - 1) / 2
    return steps * roofline.overhead_s + both + free * row_s + read


def steps_lasting(roofline: Roofline, rows: int, kv_tokens: float, seconds: float) -> int:
    """The smallest number of steps that takes at least `seconds`."""
    if seconds <= 0:
        return 0
    steps = _estimated_steps(roofline, rows, kv_tokens, seconds)
    while steps > 0 and seconds_of_steps(roofline, rows, kv_tokens, steps - 1) >= seconds:
        steps -= 1
    while seconds_of_steps(roofline, rows, kv_tokens, steps) < seconds:
        steps += 1
    return steps


def _compute_bound_steps(roofline: Roofline, rows: int, kv_tokens: float) -> int:
    over = rows * roofline.row_s - roofline.weights_s - kv_tokens * roofline.kv_token_s
    step = rows * roofline.kv_token_s
    if not roofline.overlapping or over <= 0:
        return 0
    return ceil(over / step) if step > 0 and over / step < 1e15 else 1 << 50


def _estimated_steps(roofline: Roofline, rows: int, kv_tokens: float, seconds: float) -> int:
    free = _compute_bound_steps(roofline, rows, kv_tokens)
    row_s = rows * roofline.row_s
    computing_s = row_s + roofline.overhead_s
    # Linear while compute-bound, then the positive root of a quadratic; correct up to rounding.
    if free and seconds <= free * computing_s:
        return ceil(seconds / computing_s)
    rest = seconds - free * computing_s
    step = rows * roofline.kv_token_s
    first = roofline.weights_s + (kv_tokens + rows * free) * roofline.kv_token_s
    linear = first + roofline.overhead_s + (0.0 if roofline.overlapping else row_s) - step / 2
    if step * rest < 1e-12 * linear * linear:
        return free + ceil(rest / linear)
    return free + ceil(2 * rest / (linear + sqrt(linear * linear + 2 * step * rest)))
