"""Keeps the reference policy of a KL term (`trainer.reference_kl`): the model of version 0, which
is never updated.

Each learner of a run opens with that model and loads a checkpoint afterwards. So a resumed or
replayed step has the same reference as the recorded one, and a checkpoint need not hold it.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.learn.forward import policy_scorer
from rollstream.consumers.trainer.learn.masters import Masters
from rollstream.consumers.trainer.learn.row_layout import TokenRows

ReferenceScorer = Callable[[TokenRows], Tensor]
"""Returns the log-probabilities [G] of the trained tokens under the reference, without gradient.
Several threads may call it at once.
"""


def reference_scorer(
    model: PreTrainedModel, settings: TrainerSettings, compute: torch.dtype, device: torch.device
) -> ReferenceScorer | None:
    """Returns the scorer of a copy of `model` (float32) that computes as the trained one does, or
    None if `settings` have no term with a reference. Adapters are copied too: at version 0 they
    change nothing, so the reference of an adapter run is its base.
    """
    if not settings.reference_kl:
        return None
    frozen = copy.deepcopy(model).eval()
    frozen.requires_grad_(False)  # pyright: ignore[reportUnknownMemberType]
    is_rounded = compute != torch.float32
    score = policy_scorer(
        frozen, general=is_rounded or settings.compile, joins=settings.varlen_attention
    )
    Masters(frozen, compute, device)  # none is trained: rounds and moves them as the policy's

    def logprobs(rows: TokenRows) -> Tensor:
        with torch.no_grad():
            return score(rows).logprobs

    return logprobs
