"""The supervisor of `rollstream run`: starts a run's processes and keeps them alive.

`plan` derives the processes from the configuration, `process` is one of them and the policy of its
restarts, `supervisor` watches them all, one per run's folder. `cards` assigns GPUs to processes,
`train_group` starts the trainer's ranks on this machine.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.supervisor.plan import process_specs as process_specs
    from rollstream.supervisor.process import (
        ChildProcess as ChildProcess,
        ProcessSpec as ProcessSpec,
        RestartPolicy as RestartPolicy,
    )
    from rollstream.supervisor.supervisor import (
        RunLock as RunLock,
        RunOutcome as RunOutcome,
        Supervisor as Supervisor,
    )

__getattr__ = lazy_exports(__name__)
