"""Fixtures of the trainer's tests."""

import numpy as np
import pytest

from rollstream.consumers.trainer.data.sample import Sample
from tests.trainer.learning_reference import sample


@pytest.fixture
def samples() -> list[Sample]:
    rng = np.random.default_rng(11)
    return [sample(rng, f"t{i:02d}", turn_count=1 + i % 3) for i in range(12)]
