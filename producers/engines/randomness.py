"""One uniform number per token, a function of the run's seed, the trajectory's name and the token's
position alone (invariant 10). The generator is counter-based, so any machine can draw any number in
any order.
"""

import numpy as np
import xxhash
from numpy.typing import NDArray

_STRIDE = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, SplitMix64's increment
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)  # the factors of SplitMix64's output function
_MIX_2 = np.uint64(0x94D049BB133111EB)


def trajectory_key(seed: int, trajectory: str) -> int:
    """Returns the xxh3-64 hash of the name, seeded by the run's seed (any integer)."""
    return xxhash.xxh3_64_intdigest(trajectory.encode(), seed=seed % 2**64)


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns numbers in [0, 1) with 53 random bits; the arrays broadcast. That of position p is
    element p of the SplitMix64 sequence that starts at the key (Steele, Lea, Flood, "Fast
    splittable pseudorandom number generators", 2014).
    """
    bits = np.atleast_1d(keys) + (positions.astype(np.uint64) + np.uint64(1)) * _STRIDE
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1  # arrays wrap modulo 2^64, as intended
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    bits ^= bits >> np.uint64(31)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
