"""Sandboxes for programs that a model wrote. `base` is the contract: three verbs and their bounds.

`factory` opens sandboxes as the settings say (`open_sandbox`, `run`). The back ends are
`bubblewrap` (with `process`, `control_groups` and `system_calls`) and `docker`; both serve several
calls through a process in the sandbox (`session`, `inside`). `grading` has verifiers that run the
program of an answer (docs/how-to/run-code-in-a-sandbox.md).
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.producers.sandbox.base import (
        Sandbox as Sandbox,
        SandboxFailed as SandboxFailed,
        SandboxFileError as SandboxFileError,
        SandboxLimits as SandboxLimits,
        SandboxRefused as SandboxRefused,
        SandboxResult as SandboxResult,
    )
    from rollstream.producers.sandbox.factory import (
        configured_limits as configured_limits,
        open_sandbox as open_sandbox,
        run as run,
        sandbox_report as sandbox_report,
    )

__getattr__ = lazy_exports(__name__)
