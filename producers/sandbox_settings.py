"""The sandbox settings of this process, set by the role that runs a task's code or a program of an
agent; the sandboxes that this code opens follow them.
"""

from rollstream.producers.tasks.base import PlainSandbox

_configured: PlainSandbox | None = None


def configure_sandboxes(settings: PlainSandbox) -> None:
    """Let the sandboxes that this process opens from here on have these settings."""
    global _configured
    _configured = settings


def configured_sandboxes() -> PlainSandbox | None:
    """Returns the settings; None in a program without a run, which uses the defaults."""
    return _configured
