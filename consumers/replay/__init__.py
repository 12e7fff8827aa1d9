"""Training on recorded trajectories, and copies of a run's records.

`recorded_steps` reads the steps of a run's ledger and their micro-batches, or plans steps over the
log into which `offline_log` gathers trajectories of several sources, JSON lines among them.
`training` trains the steps into a store and a log of their own. `topic_copy` copies topics to
another bus. `token_scores` scores the tokens of trajectories again. `training` and `token_scores`
import torch.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.consumers.replay.offline_log import (
        GatherRules as GatherRules,
        JsonLines as JsonLines,
        LabelledSource as LabelledSource,
        RecordedSource as RecordedSource,
        SourceTrajectory as SourceTrajectory,
        TrajectorySource as TrajectorySource,
        gather_sources as gather_sources,
    )
    from rollstream.consumers.replay.recorded_steps import (
        OfflineIndex as OfflineIndex,
        OfflinePlan as OfflinePlan,
        PlannedStep as PlannedStep,
        RecordedSteps as RecordedSteps,
        ReplayCourse as ReplayCourse,
        index_log as index_log,
        read_recorded as read_recorded,
        replay_batches as replay_batches,
    )
    from rollstream.consumers.replay.topic_copy import (
        CopiedTopic as CopiedTopic,
        CopyRequest as CopyRequest,
        copy_topic as copy_topic,
        prepare_target as prepare_target,
    )
    from rollstream.consumers.replay.training import (
        BehaviourModel as BehaviourModel,
        ReplayOutput as ReplayOutput,
        ReplayTrainer as ReplayTrainer,
    )

__getattr__ = lazy_exports(__name__)
