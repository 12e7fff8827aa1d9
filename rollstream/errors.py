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
    """A setting or argument is wrong or unknown, or does not fit another one or the run."""


class SandboxRefused(ConfigurationError):
    """This machine cannot provide the sandbox that is configured. The message names the remedy."""


class OutputLost(RollstreamError, OSError):
    """The command's output cannot be written. `is_closed`: its reader closed the pipe, as `head`
    does, which is no fault.
    """

    def __init__(self, text: str, is_closed: bool) -> None:
        super().__init__(text)
        self.is_closed = is_closed


class TooFewHeldOut(ConfigurationError):
    """A task holds out fewer prompts (`available`) than an evaluation was set to use."""

    def __init__(self, message: str, available: int) -> None:
        super().__init__(message)
        self.available = available


class AdapterMissing(ConfigurationError):
    """This host has no folder `model.lora.path`; the run's store may have the adapter."""


class OutsideRun(ConfigurationError):
    """A link of a run leaves its folder, or a file of it is not regular. Commands that look at a
    run do not open it (`contained_folder.py`).
    """


class ReadOnly(RollstreamError, PermissionError):
    """A log or store that was opened for reading was asked to write: an error of this program."""


class DecodeError(RollstreamError, ValueError):
    """Bytes are not a record that this reader understands; such bytes are moved to topic `dead`."""


class UnknownSchema(DecodeError):
    """The bytes are an undamaged record, of a schema that is unknown to this reader."""


class NewerRelease(RollstreamError, NotImplementedError):
    """The log or store holds content that only a newer release understands (invariant 14). A role
    that reads it ends and commits no position after it, for a newer release to resume there.
    """


class BusError(RollstreamError, OSError):
    """The log could not perform an operation. Except with a `SequenceGap`, acknowledged records are
    not lost.
    """


class TopicMissing(BusError, LookupError):
    """The log has no topic of this name; usually the run has not created its topics yet."""


class BusTimeout(BusError, TimeoutError):
    """The log did not answer before the deadline; whether the request took effect is unknown."""


class PositionLost(BusError, LookupError):
    """The record at a reader's position was truncated or compacted away. The reader's owner decides
    where to continue, since records are skipped.
    """


class RecordTooLarge(BusError, ValueError):
    """A record is larger than its topic accepts."""


class SequenceGap(BusError):
    """A single-holder role's records are not consecutive: the log lost one (invariant 7)."""


class StoreError(RollstreamError, OSError):
    """The object store could not perform an operation."""


class StoreTimeout(StoreError, TimeoutError):
    """The object store did not answer before the deadline; whether the request took effect is
    unknown.
    """


class ObjectMissing(StoreError, FileNotFoundError):
    """No object has this key."""


class ObjectExists(StoreError, FileExistsError):
    """A create-if-absent found an object under this key."""


class SwapLost(StoreError):
    """A compare-and-swap changed nothing: the object is in another state, usually because another
    process was first.
    """


class CorruptObject(StoreError, ValueError):
    """Stored content differs from its recorded hash or size, or cannot be read. It was not used."""


class Fenced(RollstreamError, PermissionError):
    """A higher term holds this role: the process with the lower term exits (invariant 7)."""


class LeaseHeld(RollstreamError, BlockingIOError):
    """Another living process holds a role's lease, a file's lock, or a membership in a consumer
    group.
    """


class EngineRefused(RollstreamError, ValueError):
    """The engine cannot serve this model, version or request; the message names the reason."""


class ContextFull(EngineRefused):
    """A request leaves no room to generate in the engine's context."""


class EngineUnavailable(RollstreamError, ValueError):
    """An engine or server could not be opened, or refused a version; another start may succeed."""


class EveryGroupDied(RollstreamError, RuntimeError):
    """Every group ended dead or expired: a tool, a program or a judge fails in every episode.
    Another start helps if the cause has passed.
    """
