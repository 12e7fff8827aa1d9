"""Learners: from samples to updated weights, without log or store.

`base` is the interface (`Learner`) and its factory. `learner` trains a model in this process: on
the threads and memory of `workers`, over the fp32 `masters` with AdamW, whose moments `low_bit` has
in 8 bits. A micro-batch is laid out by `row_layout` and scored by `forward`: through `llama` (with
`fused_ops`) or transformers' own forward, and the float32 head of `scores`. `loss` combines the
parts in `surrogates`, and `surrogate_check` tries a user's own. `other_policies` scores tokens
under reference and proximal policies, `reference_scores` under the reference outside the trainer.
`gae` makes advantages of a critic's values, and `critic` learns these. `mismatch` compares engine
and trainer, `paced` is a learner that only models time.

All modules import torch.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.consumers.trainer.learn.base import (
        Learner as Learner,
        open_learner as open_learner,
    )
    from rollstream.consumers.trainer.learn.forward import (
        device_of as device_of,
        forward_scores as forward_scores,
        policy_scorer as policy_scorer,
    )
    from rollstream.consumers.trainer.learn.learner import TorchLearner as TorchLearner
    from rollstream.consumers.trainer.learn.loss import (
        LossStatistics as LossStatistics,
        surrogate_loss as surrogate_loss,
    )
    from rollstream.consumers.trainer.learn.masters import (
        Masters as Masters,
        Optimiser as Optimiser,
        UpdateResult as UpdateResult,
        learning_rate as learning_rate,
    )
    from rollstream.consumers.trainer.learn.mismatch import (
        LogprobGaps as LogprobGaps,
        logprob_gaps as logprob_gaps,
    )
    from rollstream.consumers.trainer.learn.paced import (
        PacedLearner as PacedLearner,
        PacedModel as PacedModel,
    )
    from rollstream.consumers.trainer.learn.row_layout import (
        LossInputs as LossInputs,
        TokenGrid as TokenGrid,
        TokenRows as TokenRows,
        loss_inputs as loss_inputs,
        token_grid as token_grid,
        token_rows as token_rows,
    )
    from rollstream.consumers.trainer.learn.scores import (
        Float32Head as Float32Head,
        TokenScores as TokenScores,
    )
    from rollstream.consumers.trainer.learn.workers import (
        BufferPool as BufferPool,
        OrderedWorkers as OrderedWorkers,
    )

__getattr__ = lazy_exports(__name__)
