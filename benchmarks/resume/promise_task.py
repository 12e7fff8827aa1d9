"""A task for runs of known lengths: only `tokens_max` ends an answer, and its reward is the parity
of its bytes, so that groups differ and are trained.
"""

from zlib import crc32

from rollstream.producers.tasks.base import Score, Turns
from rollstream.producers.tasks.remainder import Remainder


class Parity(Remainder):
    """Questions of the remainder task with a reward that a model cannot learn."""

    name = "parity"
    stop = ()

    def judge(self, reference: str, turns: Turns) -> Score:
        """Returns 0 or 1."""
        return Score(float(crc32(bytes(turns[-1])) % 2), {})
