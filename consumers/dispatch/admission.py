"""How many groups may be admitted now, which bounds the lag (invariant 5), and which rollouts suit
which groups (`WaveLayouts`), as pure functions (invariant 9).

A wave is as many groups as one step trains. Its layout ranks its prompts by expected length and
gives each part of the ranking some rollouts.

Reading list: after `consumers/dispatch/state.py`, before `consumers/dispatch/assignments.py`.
"""

from dataclasses import dataclass

from rollstream.consumers.dispatch.state import DispatchState, UnfinishedGroup


@dataclass(frozen=True, slots=True)
class AdmissionPace:
    """`ready_groups_max` bounds admission where there is no `max_lag`; `waves_max` is the number of
    steps of the run.
    """

    groups_per_step: int
    max_lag: int | None
    ready_groups_max: int
    waves_max: int


def admissible_groups(
    pace: AdmissionPace, version: int, admitted: int, closed: int, trained: int, settled: int
) -> int:
    """Returns the number of groups that may be admitted now: AReaL's bound (arXiv 2505.24298,
    section on staleness control). A `version` seen late or twice changes nothing.

    `closed` counts groups that ended untrained (filtered, expired, dead), `settled` those trained
    in the steps up to `version`.
    """
    # Closed groups are subtracted, so they never stall admission.
    outstanding = admitted - closed
    # A group of wave w is trained in step w + 1, which starts from version w, so it may be admitted
    # from version w − `max_lag` on. `settled` counts the past as it was, and `groups_per_step` only
    # the future: a resumed run may have another size of its steps.
    if pace.max_lag is None:
        allowed = pace.ready_groups_max + trained
    else:
        allowed = settled + (pace.max_lag + 1) * pace.groups_per_step
    # No more groups than the waves of the remaining steps need.
    needed = settled + max(0, pace.waves_max - version) * pace.groups_per_step
    return max(0, min(allowed, needed) - outstanding)


def wave_of(pace: AdmissionPace, version: int, admitted: int, closed: int, settled: int) -> int:
    """The wave of the next admitted group: the one that is not full yet."""
    # A later group takes the place of a closed one. The waves before `version` are trained.
    return version + max(0, admitted - closed - settled) // pace.groups_per_step


def admissible_now(pace: AdmissionPace, state: DispatchState) -> int:
    counts = (state.admitted, state.closed, state.trained, state.settled)
    return admissible_groups(pace, state.version.number, *counts)


def next_wave(pace: AdmissionPace, state: DispatchState) -> int:
    return wave_of(pace, state.version.number, state.admitted, state.closed, state.settled)


def version_needed(pace: AdmissionPace, wave: int) -> int:
    """The smallest version number from which a group of this wave may be generated within
    `max_lag`.
    """
    return 0 if pace.max_lag is None else max(0, wave - pace.max_lag)


def start_version(pace: AdmissionPace, state: DispatchState, group: UnfinishedGroup) -> int:
    """The smallest version number from which this group may be generated. It is above the newest
    version only in a run that was resumed with a smaller `max_lag`: then the group waits.
    """
    needed = version_needed(pace, group.admitted.wave)
    if needed <= state.version.number:
        return needed
    # Groups that ended untrained may have left an earlier wave without enough groups, and its step
    # would wait for ever for groups that wait for its version. So the group counts as of the wave
    # that its place among the open groups gives it.
    place = (group.admitted.wave, group.admitted.group)
    later = sum((g.admitted.wave, g.admitted.group) > place for g in state.groups.values())
    before = state.admitted - 1 - later
    wave = wave_of(pace, state.version.number, before, state.closed, state.settled)
    return min(needed, version_needed(pace, wave))


def room_to_admit(free: int, unassigned: int, held_max: int) -> int:
    """Returns how many samples may be admitted, with room for `free` new samples."""
    # Over unlike machines these wait for fast rollouts; among as many more are some for the slow
    # ones.
    return free - unassigned + (held_max if free > 0 else 0)
