"""Chooses the tensors that are read back after an update: a bounded sample that rotates through all
of them.
"""

from collections.abc import Mapping

import torch

SAMPLE_BYTES = 32 << 20  # a tensor larger than this is a sample of its own


class TensorRotation:
    """Each call continues after the last name of the previous one. The set of names may change
    between calls.
    """

    def __init__(self, sample_bytes: int = SAMPLE_BYTES) -> None:
        self._bytes = sample_bytes
        self._after = ""

    def next(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return at least one name, each at most once; in total at most `sample_bytes` unless one
        tensor alone is larger.
        """
        names = sorted(tensors)
        later = [name for name in names if name > self._after]
        found: list[str] = []
        room = self._bytes
        for name in later + names[: len(names) - len(later)]:
            room -= tensors[name].nbytes
            if found and room < 0:
                break
            found.append(name)
        self._after = found[-1] if found else ""
        return found
