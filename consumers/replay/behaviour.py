"""Log-probabilities for tokens whose sampler recorded none: those of the model that training starts
from. The importance ratio of the first step is then 1 by definition.

Trajectories are scored one at a time, so that each gets the same bits whatever else is trained.
"""

# pyright: reportUnknownMemberType=false

import numpy as np
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from rollstream.consumers.trainer.learn.row_layout import token_rows
from rollstream.consumers.trainer.learn.policy_forward import policy_scorer
from rollstream.consumers.trainer.data.sample_part import sample_of
from rollstream.streams.records import Trajectory


class BehaviourModel:
    """Replaces the unknown behaviour policy by the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._policy = policy_scorer(model.eval())

    def fill(self, record: Trajectory) -> Trajectory:
        """Return the record with the model's log-probabilities at the record's temperature."""
        with torch.no_grad():
            scores = self._policy(token_rows([sample_of(record, 0.0)]))
        return replace(record, logprobs=scores.logprobs.numpy().astype(np.float32))
