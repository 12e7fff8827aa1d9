"""The micro-batches of a recorded step under the rule and the filter of a replay.

With the run's own rule and no filter they are the recorded ones, sample for sample. Samples that
another rule adds to the recorded takes (a larger `max_lag`) are packed into further micro-batches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rollstream.consumers.replay.recorded_steps import PlannedStep
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.metrics import StepMetrics
from rollstream.consumers.trainer.data.groups import fetch_annotations, fetch_group
from rollstream.consumers.trainer.data.packing import pack_micro_batches
from rollstream.consumers.trainer.data.prepare import TrainingRule, prepare_group
from rollstream.consumers.trainer.data.sample_part import Sample
from rollstream.streams.admissible import BelievedVersions
from rollstream.streams.bus import Bus
from rollstream.streams.values import GroupMembers
from rollstream.streams.records import Take, Trajectory


@dataclass(frozen=True, slots=True)
class ReplayCourse:
    """The settings and the rule under which steps are trained. `keep(trajectory, version)` is the
    filter of the trajectories for a step trained from `version`.
    """

    settings: TrainerSettings
    rule: TrainingRule
    keep: Callable[[Trajectory, int], bool] = lambda record, version: True


def replay_batches(
    log: Bus, takes: Sequence[Take], course: ReplayCourse, planned: PlannedStep, figures: StepMetrics
) -> Iterator[list[Sample]]:
    """Yield the micro-batches of one update of the planned step. Raises `ValueError` for bytes that
    differ from the ledger's record, `PositionLost` for a missing record.
    """
    samples: dict[str, Sample] = {}
    for take in takes:
        for group in take.groups:
            found = _samples_of(log, take, group, course, planned, figures)
            samples |= {sample.trajectory: sample for sample in found}
        named = [member.trajectory for member in take.members]
        batch = [samples.pop(name) for name in named if name in samples]
        if batch:
            yield batch
    for more in pack_micro_batches(list(samples.values()), course.settings.micro_batch_tokens):
        yield list(more)


def _samples_of(
    log: Bus,
    take: Take,
    group: GroupMembers,
    course: ReplayCourse,
    planned: PlannedStep,
    figures: StepMetrics,
) -> Sequence[Sample]:
    version = planned.step - 1
    believed = BelievedVersions(0, planned.terms).up_to(take.believed)
    noted = fetch_annotations(log, take.annotations)
    records = [arrived.record for arrived in fetch_group(log, group.members)]
    kept = [record for record in records if course.keep(record, version)]
    figures.counts["filtered_out"] += len(records) - len(kept)
    if not kept:
        figures.add_closed("filtered", {})
        return ()
    prepared = prepare_group(group.group, kept, noted, course.rule, version, believed)
    if prepared.ending:
        figures.add_closed(prepared.ending, prepared.counts, kept)
        return ()
    figures.add_trained(kept, prepared.samples, prepared.counts)
    figures.add_consumed(prepared.samples, version)
    return prepared.samples
