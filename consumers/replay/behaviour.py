"""Log-probabilities of tokens whose sampler kept none: those of the model that training begins
with. The ratio of the first step is then 1 by definition, whoever wrote the tokens.

One trajectory at a time, so that each has the same bits whatever else is trained.
"""

# pyright: reportUnknownMemberType=false

import numpy as np
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from consumers.trainer.layout import rows_of
from consumers.trainer.policy_forward import policy_of
from consumers.trainer.sample import sample_of
from streams.records import Trajectory


class Behaviour:
    """Stands in for the behaviour policy."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._policy = policy_of(model.eval())

    def fill(self, record: Trajectory) -> Trajectory:
        """The record with the model's log-probabilities at the record's temperature."""
        with torch.no_grad():
            scores = self._policy(rows_of([sample_of(record, 0.0)]))
        return replace(record, logprobs=scores.logprobs.numpy().astype(np.float32))
