"""The warm-up: supervised training of a new model on the documents of its task.

`warmup` trains the model and writes its folder, `process` runs that as a process of
`rollstream run` with a progress bar.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.warmup.process import (
        WarmupFailed as WarmupFailed,
        WarmupProcess as WarmupProcess,
    )
    from rollstream.warmup.warmup import (
        SftSchedule as SftSchedule,
        is_warmed_up as is_warmed_up,
        train_sft as train_sft,
        warm_up as warm_up,
    )

__getattr__ = lazy_exports(__name__)
