"""The engine `torch`, but it chooses each token from two thirds of the vocabulary, by its index in
the trajectory, and writes these sets as the array `allowed`.

`python -m tests.support.masked_engine COMMAND …` is `testbed.kills.aimed_role` with this engine in
place of `torch`.
"""

import sys
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rollstream.producers.engines.kind import ENGINES
from rollstream.producers.engines.torch.kind import TorchKind

MODULE = "tests.support.masked_engine"


def allowed_tokens(indices: NDArray[np.int64], vocabulary: int) -> NDArray[np.bool_]:
    """The tokens [n, vocabulary] that may be at these indices [n] of a trajectory."""
    return np.arange(vocabulary) % 3 != indices[:, None] % 3


def packed_rows(start: int, end: int, vocabulary: int) -> NDArray[np.uint8]:
    rows = allowed_tokens(np.arange(start, end), vocabulary)
    return np.packbits(rows, axis=1, bitorder="little")


class MaskedEngine:
    """`TorchEngine` in all other respects."""

    def __init__(self, engine: Any) -> None:
        import torch

        self._engine = engine
        self._length: dict[str, int] = {}
        decoder = engine._decoder
        step = decoder.step

        def masked_step(ids: Any, positions: Any, *more: Any) -> Any:
            logits = step(ids, positions, *more)
            allowed = allowed_tokens((positions + 1).numpy(), logits.shape[1])
            return logits.masked_fill(~torch.from_numpy(allowed), -torch.inf)

        decoder.step = masked_step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Any) -> None:
        self._engine.submit(request)
        self._length[request.trajectory] = len(request.tokens)

    def append(self, trajectory: str, tokens: Any, noise: str = "") -> None:
        self._engine.append(trajectory, tokens, noise)
        self._length[trajectory] += len(tokens)

    def poll(self, deadline_s: float) -> list[Any]:
        return [self._with_rows(emission) for emission in self._engine.poll(deadline_s)]

    def abort(self, trajectory: str) -> Any:
        emission = self._engine.abort(trajectory)
        return None if emission is None else self._with_rows(emission)

    def _with_rows(self, emission: Any) -> Any:
        start = self._length[emission.trajectory]
        end = self._length[emission.trajectory] = start + len(emission.tokens)
        rows = packed_rows(start, end, self._engine.vocabulary)
        return replace(emission, arrays={"allowed": rows})


class MaskedKind(TorchKind):
    def needs(self, r: Any) -> frozenset[str]:
        return frozenset({"arrays/allowed"})

    def open(self, c: Any, model: Any, tensors: Any, version: Any, options: Any) -> Any:
        # A short answer has several emissions, and so partials.
        options = replace(options, emit_every=4)
        return MaskedEngine(TorchKind.open(self, c, model, tensors, version, options))


def main() -> int:
    # Imported first: it wraps functions of the product before others import them.
    from testbed.kills import aimed_role

    cast("dict[str, str]", ENGINES)["torch"] = f"{MODULE}:MaskedKind"
    aimed_role.MODULE = MODULE
    return aimed_role.main()


if __name__ == "__main__":
    sys.exit(main())
