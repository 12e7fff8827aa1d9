"""The configuration that the cases of this folder share, and its options as settings."""

from pathlib import Path

CONFIGURATION = Path(__file__).with_name("waiting.toml")


def options(**changed: object) -> tuple[str, ...]:
    """Returns settings that change these options of the task `Sleeping`."""
    return tuple(f"task.options.{name}={value}" for name, value in changed.items())
