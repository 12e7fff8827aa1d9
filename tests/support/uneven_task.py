"""The remainder task with rewards that differ within a group, so that every step has a gradient."""

from zlib import crc32

from rollstream.producers.tasks.base import Score, Turns
from rollstream.producers.tasks.remainder import Remainder


class Uneven(Remainder):
    def judge(self, reference: str, turns: Turns) -> Score:
        return Score(crc32(str([list(turn) for turn in turns]).encode()) % 7 / 7)
