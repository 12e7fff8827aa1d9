"""The configuration that cases with waiting environments share (`slots.py`, `redundancy.py`), and
its task with options as settings.
"""

from pathlib import Path

from benchmarks.agents.sleeping import Sleeping

CONFIGURATION = Path(__file__).with_name("waiting.toml")
TASK = f"{Sleeping.__module__}:{Sleeping.__qualname__}"


def options(**changed: object) -> tuple[str, ...]:
    """Returns settings that select the task `Sleeping` and change these of its options."""
    named = (f"task.options.{name}={value}" for name, value in changed.items())
    return (f"task.name={TASK}", *named)
