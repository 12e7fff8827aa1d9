"""The warm-up: supervised training of a new model on the documents of its task.

`warmup` writes the model's folder, `sft` is the training loop, `process` runs the warm-up as a
process of `rollstream run` with a progress bar.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.warmup.process import (
        WarmupFailed as WarmupFailed,
        WarmupProcess as WarmupProcess,
    )
    from rollstream.warmup.sft import (
        SftSchedule as SftSchedule,
        train_sft as train_sft,
    )
    from rollstream.warmup.warmup import (
        is_warmed_up as is_warmed_up,
        warm_up as warm_up,
    )

__getattr__ = lazy_exports(
    __name__,
    {
        "process": (
            "WarmupFailed",
            "WarmupProcess",
        ),
        "sft": (
            "SftSchedule",
            "train_sft",
        ),
        "warmup": (
            "is_warmed_up",
            "warm_up",
        ),
    },
)
