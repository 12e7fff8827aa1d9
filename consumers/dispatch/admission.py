"""Admission: the number of groups that may start now. Pure (invariant 9).

It paces the run first (invariant 5) with the bound of AReaL (arXiv 2505.24298, section on staleness
control), written on version numbers so that a version seen late or twice changes nothing. All terms
count groups.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdmissionPace:
    """The settings that bound admission; `waves_max` is the number of steps of the run."""

    groups_per_step: int
    max_lag: int | None
    ready_groups_max: int
    waves_max: int


def admissible_groups(
    pace: AdmissionPace, version: int, admitted: int, closed: int, trained: int
) -> int:
    """Groups that may be admitted now.

    `admitted` counts all groups ever admitted, `closed` those that ended untrained (filtered,
    expired, dead), so closed groups never stall admission; `admitted − closed` is the number of
    accepted plus running groups. A group admitted at wave w is trained by step w + 1, from version
    w: it may start at version w − η, no earlier.
    """
    outstanding = admitted - closed
    if pace.max_lag is None:
        allowed = pace.ready_groups_max + trained
    else:
        allowed = (pace.max_lag + version + 1) * pace.groups_per_step
    return max(0, min(allowed, pace.waves_max * pace.groups_per_step) - outstanding)


def wave_of(pace: AdmissionPace, admitted: int, closed: int) -> int:
    """The wave of the next admitted group; a refill of a closed group joins the wave that it
    completes.
    """
    return (admitted - closed) // pace.groups_per_step


def version_needed(pace: AdmissionPace, wave: int) -> int:
    """Smallest version number under which a group of this wave may start and still obey
    `max_lag`.
    """
    return 0 if pace.max_lag is None else max(0, wave - pace.max_lag)
