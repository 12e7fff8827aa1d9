"""The trainer role: takes complete groups from the log, trains them, and publishes versions.

The modules in the order of a step: `build` restores the newest checkpoint and the ledger behind it,
`loop` runs the phases of each step, `data/` selects and prepares the samples, `learn/` computes
gradients and updates, `publisher` publishes finished steps in a thread of its own through
`versions`, `checkpoint` and `ledger`; `metrics` are those of a step. `past_versions` reads versions
for the loss. `sharded/` is a learner of several processes.

Most modules import torch.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.consumers.trainer.build import (
        InitialModel as InitialModel,
        Provenance as Provenance,
        TrainerPlan as TrainerPlan,
        build_trainer as build_trainer,
    )
    from rollstream.consumers.trainer.checkpoint import TrainerState as TrainerState
    from rollstream.consumers.trainer.ledger import (
        Ledger as Ledger,
        LedgerTail as LedgerTail,
        TrainerTotals as TrainerTotals,
        missing_lines as missing_lines,
        step_line as step_line,
    )
    from rollstream.consumers.trainer.loop import Trainer as Trainer
    from rollstream.consumers.trainer.metrics import StepMetrics as StepMetrics
    from rollstream.consumers.trainer.publisher import (
        CheckpointRetention as CheckpointRetention,
        StepPublisher as StepPublisher,
        StepSnapshot as StepSnapshot,
    )
    from rollstream.consumers.trainer.versions import VersionWriter as VersionWriter

__getattr__ = lazy_exports(__name__)
