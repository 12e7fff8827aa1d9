"""From the log to samples, and the records that the trainer still needs.

`groups` collects completions and annotations by group, `prepare` turns a group into samples with
advantages, masked by lag, `sample` is one of them, `credit` has rewards of its turns or tokens,
`ready_groups` holds records and samples.
`selection` chooses groups and packs samples into micro-batches, `takes` records them in the ledger
and submits them to the learner, those of an earlier configuration by its choices
(`earlier_rules`). `poisoned_takes` gives up takes that no learner can compute.
`retention` pins versions, truncates topics and reads truncated records from the archive.
`rule_checks` tries a user's advantage or rule of choice.

`takes` imports torch; the audit, which imports other modules of this package, must not.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.consumers.trainer.data.groups import (
        GroupIntake as GroupIntake,
        ReceivedAnnotation as ReceivedAnnotation,
        ReceivedCompletion as ReceivedCompletion,
        TrainerGroup as TrainerGroup,
        fetch_annotations as fetch_annotations,
        fetch_group as fetch_group,
    )
    from rollstream.consumers.trainer.data.poisoned_takes import (
        ComputeFailed as ComputeFailed,
        SupersededTakes as SupersededTakes,
        TakeAttempts as TakeAttempts,
        plan_superseded as plan_superseded,
    )
    from rollstream.consumers.trainer.data.prepare import (
        PreparedGroup as PreparedGroup,
        TrainingRule as TrainingRule,
        advantages as advantages,
        prepare_group as prepare_group,
        training_rule as training_rule,
    )
    from rollstream.consumers.trainer.data.ready_groups import ReadyGroup as ReadyGroup
    from rollstream.consumers.trainer.data.retention import (
        ArchiveBackedBus as ArchiveBackedBus,
        HeldVersions as HeldVersions,
        LogTruncation as LogTruncation,
        PinnedVersions as PinnedVersions,
    )
    from rollstream.consumers.trainer.data.sample import (
        Sample as Sample,
        annotated_rewards as annotated_rewards,
        sample_of as sample_of,
    )
    from rollstream.consumers.trainer.data.selection import (
        AnnotationWatch as AnnotationWatch,
        GroupCandidate as GroupCandidate,
        UpdateProgress as UpdateProgress,
        freshest as freshest,
        load_choice as load_choice,
        oldest as oldest,
        pack_micro_batches as pack_micro_batches,
    )
    from rollstream.consumers.trainer.data.takes import TakeFeeder as TakeFeeder

__getattr__ = lazy_exports(__name__)
