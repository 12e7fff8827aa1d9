"""The errors that a caller may expect and handle; programmer errors are asserts. Each is also an
error of the standard library; its message names the failure, its place and the remedy.
"""

# For a `ConfigurationError` or `NewerRelease`: another start cannot help, so the supervisor makes
# none.
EXIT_REFUSED = 2
# For `EngineUnavailable` and `EveryGroupDied`: another start may help. The supervisor gives up when
# a role ends with this code twice in a row.
EXIT_UNSERVED = 3

# The reader of the output closed the pipe: 128 + SIGPIPE, the shell's convention.
EXIT_CLOSED_PIPE = 141


class RollstreamError(Exception):
    """The base class of these errors."""


class ConfigurationError(RollstreamError, ValueError):
    """A setting or argument is wrong or unknown, or does not fit the rest or the run."""


class SandboxRefused(ConfigurationError):
    """This machine cannot provide the configured sandbox; the message names the remedy."""


class OutputLost(RollstreamError, OSError):
    """`is_closed`: the output's reader closed the pipe, as `head` does, which is no fault."""

    def __init__(self, text: str, is_closed: bool) -> None:
        super().__init__(text)
        self.is_closed = is_closed


class TooFewHeldOut(ConfigurationError):
    """Fewer prompts (`available`) than an evaluation uses."""

    def __init__(self, message: str, available: int) -> None:
        super().__init__(message)
        self.available = available


class AdapterMissing(ConfigurationError):
    """This host has no folder `model.lora.path`; the run's store may have the adapter."""


class OutsideRun(ConfigurationError):
    """A link of a run leaves its folder, or a file of it is not regular; not opened."""


class ReadOnly(RollstreamError, PermissionError):
    """A log or store that was opened for reading was asked to write: an error of this program."""


class DecodeError(RollstreamError, ValueError):
    """Bytes that this reader does not understand; moved to topic `dead`."""


class UnknownSchema(DecodeError):
    """An undamaged record of an unknown schema."""


class NewerRelease(RollstreamError, NotImplementedError):
    """Content that only a newer release understands (invariant 14). A role that reads it ends and
    commits no position after it.
    """


class BusError(RollstreamError, OSError):
    """Except with a `SequenceGap`, acknowledged records are not lost."""


class TopicMissing(BusError, LookupError):
    """Usually the run has not created its topics yet."""


class BusTimeout(BusError, TimeoutError):
    """Whether the request took effect is unknown."""


class PositionLost(BusError, LookupError):
    """The record at a reader's position was truncated or compacted away; the reader's owner decides
    where to continue.
    """


class RecordTooLarge(BusError, ValueError):
    """A record is larger than its topic accepts."""


class SequenceGap(BusError):
    """A single-holder role's records are not consecutive: the log lost one (invariant 7)."""


class StoreError(RollstreamError, OSError):
    """The object store could not perform an operation."""


class StoreTimeout(StoreError, TimeoutError):
    """Whether the request took effect is unknown."""


class ObjectMissing(StoreError, FileNotFoundError):
    """No object has this key."""


class ObjectExists(StoreError, FileExistsError):
    """A create-if-absent found an object under this key."""


class SwapLost(StoreError):
    """The object is in another state, usually because another process was first."""


class CorruptObject(StoreError, ValueError):
    """Stored content differs from its recorded hash or size, or cannot be read; not used."""


class Fenced(RollstreamError, PermissionError):
    """A higher term holds this role: the lower one's process exits (invariant 7)."""


class LeaseHeld(RollstreamError, BlockingIOError):
    """Another process holds a role's lease, a file's lock, or a membership in a consumer group."""


class EngineRefused(RollstreamError, ValueError):
    """This model, version or request; the message names the reason."""


class ContextFull(EngineRefused):
    """A request leaves no room to generate in the engine's context."""


class EngineUnavailable(RollstreamError, ValueError):
    """An engine or server was not opened, or refused a version; another start may succeed."""


class EveryGroupDied(RollstreamError, RuntimeError):
    """Dead or expired: a tool, a program or a judge fails in every episode. Another start helps if
    the cause has passed.
    """
