"""Scorers: late rewards and other facts about finished trajectories, written as annotations.

`scorer` reads trajectories as a consumer group and publishes the annotations. `functions` loads a
scorer's function and defines the finished trajectory that it gets (`docs/how-to/late-rewards.md`).
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.producers.scoring.functions import (
        Finished as Finished,
        ScoringFunction as ScoringFunction,
    )
    from rollstream.producers.scoring.scorer import (
        AnnotationPlan as AnnotationPlan,
        Scorer as Scorer,
    )

__getattr__ = lazy_exports(__name__)
